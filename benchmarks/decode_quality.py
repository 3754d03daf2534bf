"""What a trained model's translations are worth by whom they are made: lsq's engine, fairseq in
float32, CTranslate2.

    python benchmarks/decode_quality.py RUN [--tokenizer char]

RUN is a run of `lsq train-text` in int8, of subwords, that has translated its test set: these
hypotheses are the first side. The others translate the same sentences with what `lsq export`
writes; "lsq int4" with --bits 4. In float32 the weights are what the codes stand for, and no
activation is rounded.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import common
import torch
from fairseq import checkpoint_utils
from fairseq.data.data_utils import collate_tokens
from fairseq.sequence_generator import SequenceGenerator

from lsq import Translator
from lsq.commands import cli
from lsq.serving.translator import batches
from lsq.text import score
from lsq.text.corpus import read_items

TRAINING, FLOAT = "the training's own evaluation", "fairseq float32"
BATCH_TOKENS = 2048

Side = Callable[[Sequence[str]], list[str]]
"""Lines -> their translations."""


def run_lsq(*words: str) -> None:
    """Run a command of lsq; if it fails, this process ends with its status."""
    status = cli.main(list(words))
    if status:
        sys.exit(status)


def of_lsq(translator: Translator, beam: int) -> Side:
    options = replace(translator.options, beam=beam)
    return lambda lines: [best.text for best, *_ in translator.translate(lines, options)]


def of_fairseq(exported: Path, data: Path, translator: Translator, beam: int) -> Side:
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(exported)], {"data": str(data)}
    )
    words, most = task.target_dictionary, translator.options.max_len_b
    generator = SequenceGenerator([model.eval()], words, beam_size=beam, max_len_b=most)

    def translate(lines: Sequence[str]) -> list[str]:
        sources = [translator.model.subwords.source_words(line) for line in lines]
        found: dict[int, str] = {}
        limit = translator.limit(replace(translator.options, beam=beam))
        for batch in batches([len(source) for source in sources], limit):
            given = [sources[number] for number in batch]
            tokens = collate_tokens(given, words.pad(), words.eos(), left_pad=True)
            sample = {
                "src_tokens": tokens,
                "src_lengths": torch.tensor([len(source) for source in given]),
            }
            with torch.inference_mode():
                hypotheses = generator.generate([model], {"net_input": sample})
            for number, (best, *_) in zip(batch, hypotheses, strict=True):
                found[number] = translator.model.subwords.text(best["tokens"])
        return [found[number] for number in range(len(lines))]

    return translate


def of_ctranslate2(
    exported: Path, compute_type: str, translator: Translator, beam: int, threads: int
) -> Side:
    engine = common.ctranslate2().Translator(
        str(exported), compute_type=compute_type, intra_threads=threads
    )
    subwords, most = translator.model.subwords, translator.options.max_len_b

    def translate(lines: Sequence[str]) -> list[str]:
        pieces = [subwords.processor.encode(line, out_type=str) for line in lines]
        found = engine.translate_batch(
            pieces,
            beam_size=beam,
            max_decoding_length=most,
            max_input_length=0,
            max_batch_size=BATCH_TOKENS,
            batch_type="tokens",
        )
        return [subwords.processor.decode(one.hypotheses[0]) for one in found]

    return translate


def sides_of(run: Path, beam: int, threads: int, folder: Path) -> dict[str, Side]:
    """The decoders; `folder` takes the exported models."""
    exported = {target: folder / f"{target}.model" for target in ("lsq", "fairseq", "ctranslate2")}
    for target, path in exported.items():
        run_lsq("export", str(run), "--to", target, "--output", str(path))
    narrow = folder / "int4.model"
    run_lsq("export", str(run), "--to", "lsq", "--bits", "4", "--output", str(narrow))
    translator = Translator(exported["lsq"])
    found = {"lsq int8": of_lsq(translator, beam), "lsq int4": of_lsq(Translator(narrow), beam)}
    found[FLOAT] = of_fairseq(exported["fairseq"], run.absolute().parent / "data", translator, beam)
    for compute_type in ("int8", "float32"):
        name = f"ctranslate2 {compute_type}"
        found[name] = of_ctranslate2(
            exported["ctranslate2"], compute_type, translator, beam, threads
        )
    return found


def rows(
    translations: dict[str, list[str]], references: list[str], tokenizer: str
) -> Iterator[dict]:
    """BLEU and chrF of each side, and how far it is from float32 and from the training."""
    scored = {
        name: score.scores(found, references, tokenizer) for name, found in translations.items()
    }
    for name, found in translations.items():
        yield {
            "side": name,
            "bleu": scored[name]["bleu"],
            "to_float32": round(scored[name]["bleu"] - scored[FLOAT]["bleu"], 2),
            "chrf": scored[name]["chrf"],
            "right": sum(map(str.__eq__, found, references)),
            "same_as_training": sum(map(str.__eq__, found, translations[TRAINING])),
        }


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="its folder")
    parser.add_argument("--tokenizer", choices=score.TOKENIZERS, default="13a", help="of BLEU")
    options = common.parse(parser, arguments)
    data = options.run.absolute().parent / "data"
    lines, references = read_items(data / "test.src"), read_items(data / "test.tgt")
    translations = {TRAINING: read_items(options.run / "translation" / "hypotheses.txt")}
    trained = json.loads((options.run / "results.json").read_text(encoding="utf-8"))
    beam = trained["options"]["--beam"]
    with tempfile.TemporaryDirectory() as folder:
        for name, translate in sides_of(options.run, beam, options.threads, Path(folder)).items():
            print(f"{name} translates", file=sys.stderr, flush=True)
            translations[name] = translate(lines)
    conditions = common.conditions(
        options,
        packages=("fairseq-fixed", "ctranslate2"),
        baseline=FLOAT,
        sentences=len(lines),
        beam=beam,
        updates=trained["updates"],
    )
    common.report(
        "decode_quality", rows(translations, references, options.tokenizer), conditions, options
    )


if __name__ == "__main__":
    main()
