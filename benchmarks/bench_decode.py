"""Translating on the CPU: lsq in int8 and narrower, CTranslate2 in int8, fairseq in float32.

All translate the same sentences with a beam of the same size to the same number of words: their
models' weights are random, so that none would end by itself. "ratio" is the baseline's median over
the side's. With one thread, times are the processor's.
"""

import argparse
import dataclasses
import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import common
import torch
import transformer
from decoding_models import FORMATS, random_model
from fairseq.data.data_utils import collate_tokens
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from lsq.serving import SearchOptions, export_ctranslate2, model_file
from lsq.serving.decoding_model import model_of
from lsq.serving.engine import Engine
from lsq.serving.model_file import ExportedModel
from lsq.serving.search import search

BASELINE = "ctranslate2 int8"
FLOAT = "fairseq float32"
LSQ = {f"lsq {form}": form.replace("/", "-") for form in FORMATS}
"""Sides of lsq -> the files of their models."""
FILES = {**LSQ, BASELINE: "ctranslate2/model.bin"}
SHORTEST, LONGEST, MEAN, SPREAD = 4, 80, 26.0, 0.5
"""Words of a source: log-normal, cut, as sentences of news are (a mean of 26 words, a deviation of
13)."""

BEAMS, BATCHES = (1, 4), (1, 8, 32)

Side = Callable[[Sequence[Tensor], int, int], int]
"""(sources int64 [S], beam, words of each hypothesis) -> words of the best hypotheses."""


def sources(count: int, vocabulary: int, seed: int) -> list[Tensor]:
    """Sentences int64 [S] with their end symbols, of natural lengths, longest first."""
    generator = torch.Generator().manual_seed(seed)
    deviation = SPREAD * torch.randn(count, generator=generator)
    lengths = (MEAN * torch.exp(deviation - SPREAD**2 / 2)).round().long().clamp(SHORTEST, LONGEST)
    return [
        torch.cat([torch.randint(4, vocabulary, (length,), generator=generator), torch.tensor([2])])
        for length in sorted(lengths.tolist(), reverse=True)
    ]


def write_models(shape: transformer.Shape, folder: Path) -> None:
    """Write a model with measured clips for lsq and, if it is installed, for CTranslate2; for lsq
    also models of the same architecture in narrower formats."""
    side = transformer.Side(shape, arguments=transformer.LSQ)
    side.loss(transformer.batch(shape, padded=True, seed=1))
    symbols = tuple(transformer.made_up_dictionary(shape.vocabulary).symbols)
    model = model_of(side.model.eval())
    folder.mkdir()
    for form, file in zip(FORMATS, LSQ.values(), strict=True):
        chosen = model if form == "int8" else random_model(model.architecture, form)
        exported = ExportedModel(model=chosen, source=symbols, target=symbols)
        model_file.write(folder / file, exported)
    if find_spec("ctranslate2"):
        export_ctranslate2.write(folder / "ctranslate2", model, symbols, symbols)


def of_lsq(file: str, shape: transformer.Shape, folder: Path, threads: int) -> Side:
    engine = Engine(model_file.read(folder / file).model)

    def translate(given: Sequence[Tensor], beam: int, words: int) -> int:
        options = SearchOptions(beam=beam, min_len=words - 1, max_len_b=words - 1)
        return sum(len(found[0].words) for found in search(engine, given, options))

    return translate


def of_ctranslate2(shape: transformer.Shape, folder: Path, threads: int) -> Side:
    """CTranslate2 with the same model.

    Raises:
        ImportError: it is not installed.
    """
    translator = common.ctranslate2().Translator(
        str(folder / "ctranslate2"), compute_type="int8", inter_threads=1, intra_threads=threads
    )
    symbols = transformer.made_up_dictionary(shape.vocabulary).symbols

    def translate(given: Sequence[Tensor], beam: int, words: int) -> int:
        texts = [[symbols[word] for word in sentence[:-1]] for sentence in given]  # it adds the end
        found = translator.translate_batch(
            texts, beam_size=beam, min_decoding_length=words - 1, max_decoding_length=words - 1
        )
        return sum(len(one.hypotheses[0]) + 1 for one in found)

    return translate


def of_fairseq(shape: transformer.Shape, folder: Path, threads: int) -> Side:
    model = transformer.Side(shape, arguments=transformer.FAIRSEQ).model.eval()
    model.make_generation_fast_()
    symbols = transformer.made_up_dictionary(shape.vocabulary)

    def translate(given: Sequence[Tensor], beam: int, words: int) -> int:
        generator = SequenceGenerator(
            [model], symbols, beam_size=beam, max_len_b=words - 1, min_len=words - 1
        )
        tokens = collate_tokens(given, symbols.pad(), symbols.eos(), left_pad=True)
        lengths = torch.tensor([len(sentence) for sentence in given])
        with torch.no_grad():
            found = generator.generate(
                [model], {"net_input": {"src_tokens": tokens, "src_lengths": lengths}}
            )
        return sum(len(hypotheses[0]["tokens"]) for hypotheses in found)

    return translate


SIDES: dict[str, Callable[[transformer.Shape, Path, int], Side]] = {
    **{name: functools.partial(of_lsq, file) for name, file in LSQ.items()},
    BASELINE: of_ctranslate2,
    FLOAT: of_fairseq,
}
"""Name -> what loads the side from the folder of its models."""


def peak_megabytes(name: str, folder: Path, options) -> float:
    """Megabytes that loading a side and its largest batch take in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--alone",
        name,
        "--folder",
        str(folder),
        "--threads",
        str(options.threads),
    ]
    command += ["--words", str(options.words), "--beams", str(max(options.beams))]
    command += ["--batches", str(max(options.batches))]
    return float(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    )


def print_peak(name: str, folder: Path, shape: transformer.Shape, options) -> None:
    """Print by how many megabytes this process grew; importing packages does not count."""
    SIDES[name](transformer.QUICK, folder / "quick", options.threads)(
        sources(1, transformer.QUICK.vocabulary, 1), 1, 2
    )
    before = megabytes("VmRSS")
    side = SIDES[name](shape, folder / "model", options.threads)
    side(sources(max(options.batches), shape.vocabulary, seed=1), max(options.beams), options.words)
    print(megabytes("VmHWM") - before)


def megabytes(what: str) -> float:
    """Memory that this process has now (VmRSS) or had at most (VmHWM), as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) / 1024


def rows(
    sides: dict[str, Side], files: dict[str, float], peaks: dict[str, float], options
) -> Iterator[dict]:
    vocabulary = transformer.QUICK.vocabulary if options.quick else transformer.Shape().vocabulary
    for beam in options.beams:
        for count in options.batches:
            given = sources(count, vocabulary, seed=count)
            words = {name: side(given, beam, options.words) for name, side in sides.items()}
            if len(set(words.values())) != 1:
                raise RuntimeError(f"the sides did not write the same number of words: {words}")
            timings = common.alternate(
                {
                    name: functools.partial(side, given, beam, options.words)
                    for name, side in sides.items()
                },
                rounds=options.rounds,
                warm_up=1,
                clock=common.clock_of(options),
            )
            baseline = timings[BASELINE if BASELINE in timings else FLOAT]
            for name, timing in timings.items():
                yield {
                    "side": name,
                    "beam": beam,
                    "sentences": count,
                    "seconds": timing.median,
                    "fastest": timing.fastest,
                    "tokens_per_second": words[name] / timing.median,
                    "milliseconds_per_sentence": 1e3 * timing.median / count,
                    "ratio": baseline.median / timing.median,
                    "ratio_of_fastest": baseline.fastest / timing.fastest,
                    "file_megabytes": files.get(name),
                    "peak_megabytes": peaks.get(name),
                }


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--words", type=common.positive, default=32, metavar="N", help="words of each translation"
    )
    parser.add_argument(
        "--beams", type=common.positive, nargs="+", default=BEAMS, metavar="N", help="hypotheses"
    )
    parser.add_argument(
        "--batches", type=common.positive, nargs="+", default=BATCHES, metavar="N", help="sentences"
    )
    parser.add_argument(
        "--side", action="append", choices=SIDES, metavar="NAME", help="only these; repeatable"
    )
    parser.add_argument("--alone", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = common.parse(parser, arguments)
    if options.quick:
        options.batches, options.words = (1, 3), 5
    shape = transformer.QUICK if options.quick else transformer.Shape()
    if options.alone:
        print_peak(options.alone, options.folder, shape, options)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_models(shape, folder / "model")
        write_models(transformer.QUICK, folder / "quick")
        sides, missing, peaks = {}, {}, {}
        for name in options.side or SIDES:
            try:
                sides[name] = SIDES[name](shape, folder / "model", options.threads)
            except ImportError as error:
                missing[name] = str(error)
        if not options.quick:
            peaks = {name: peak_megabytes(name, folder, options) for name in sides}
        files = {
            name: 1e-6 * (folder / "model" / FILES[name]).stat().st_size
            for name in FILES.keys() & sides.keys()
        }
        table = list(rows(sides, files, peaks, options))
    conditions = common.conditions(
        options,
        packages=("fairseq-fixed", "ctranslate2"),
        baseline=BASELINE if BASELINE in sides else FLOAT,
        shape=dataclasses.asdict(shape),
        words=options.words,
        clock=common.clock_of(options).__name__,
        missing=missing,
        source_words={
            count: [len(one) for one in sources(count, shape.vocabulary, count)]
            for count in options.batches
        },
    )
    common.report("decode", table, conditions, options)


if __name__ == "__main__":
    main()
