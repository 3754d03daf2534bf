"""A language model of a Llama's size on the CPU: words a second and bytes, by format of weights.

12 layers, 768 wide, 32,000 words, SwiGLU, RMSNorm: 110 million random weights. lsq's has sinusoidal
positions instead of rotations. All sides write the same number of words for each text, always the
likeliest one. With one thread, times are the processor's. "weights_megabytes" are the weights that
products read, of lsq packed; "words_megabytes" are of a table of words beside them.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import common
import llama_cpp_side
import torch
from decoding_models import FORMATS, START, llama_architecture, packed_megabytes, random_model
from model_sides import llama

from lsq.native import loader
from lsq.serving import SearchOptions, model_file
from lsq.serving.engine import Engine
from lsq.serving.model_file import ExportedModel
from lsq.serving.search import search

BASELINE = "lsq int8"
TEXTS = (1, 8)


@dataclass(frozen=True, kw_only=True)
class Side:
    write: Callable[[int, int], int]
    """(texts, words of each) -> words that were written."""
    weights: Callable[[], float]
    """Megabytes of weights, after it has written."""
    words: float
    """Megabytes of a table of words beside them."""
    file: float
    """Megabytes."""


def of_lsq(weight_format: str, folder: Path, options) -> Side:
    path = folder / "model.safetensors"
    described = llama_architecture(options.layers, options.quick)
    symbols = tuple(map(str, range(described.decoder.words)))
    model = random_model(described, weight_format)
    model_file.write(path, ExportedModel(model=model, source=None, target=symbols))
    engine = Engine(model_file.read(path).model)

    def write(texts: int, words: int) -> int:
        chosen = SearchOptions(beam=1, min_len=words - 1, max_len_b=words - 1)
        found = search(engine, [torch.tensor([START])] * texts, chosen)
        return sum(len(hypotheses[0].words) for hypotheses in found)

    return Side(
        write=write,
        weights=lambda: packed_megabytes(engine),
        words=1e-6 * model.words("decoder").nbytes,
        file=1e-6 * path.stat().st_size,
    )


def of_transformers(dtype: torch.dtype, folder: Path, options) -> Side:
    """transformers' Llama by its own `generate`; ImportError: it is not installed."""
    model = llama(options.layers, options.quick).to(dtype).eval()
    model.save_pretrained(folder)

    def write(texts: int, words: int) -> int:
        begun = torch.full((texts, 1), START)
        found = model.generate(
            begun,
            attention_mask=torch.ones_like(begun),
            min_new_tokens=words,
            max_new_tokens=words,
            do_sample=False,
            pad_token_id=0,
        )
        return found[:, 1:].numel()

    return Side(
        write=write,
        weights=lambda: 1e-6 * sum(parameter.nbytes for parameter in model.parameters()),
        words=0.0,
        file=1e-6 * sum(path.stat().st_size for path in folder.glob("*.safetensors")),
    )


def of_llama_cpp(weight_format: str, folder: Path, options) -> Side:
    """llama.cpp; ImportError: it is not installed."""
    path = folder / "model.gguf"
    size = (256, 256, 64) if options.quick else (768, 2048, 32000)
    llama_cpp_side.write(path, weight_format, (options.layers, *size))
    write = llama_cpp_side.writer_of(path, options.threads, max(options.texts), options.words)
    megabytes = 1e-6 * path.stat().st_size
    return Side(write=write, weights=lambda: megabytes, words=0.0, file=megabytes)


SIDES: dict[str, Callable[..., Side]] = {
    **{f"lsq {form}": functools.partial(of_lsq, form) for form in FORMATS},
    **{
        f"llama.cpp {form}": functools.partial(of_llama_cpp, form)
        for form in llama_cpp_side.FORMATS
    },
    "transformers bfloat16": functools.partial(of_transformers, torch.bfloat16),
    "transformers float32": functools.partial(of_transformers, torch.float32),
}


def rows(sides: dict[str, Side], options) -> Iterator[dict]:
    for texts in options.texts:
        count = {name: side.write(texts, options.words) for name, side in sides.items()}
        if set(count.values()) != {texts * options.words}:
            raise RuntimeError(f"the sides did not write the same number of words: {count}")
        timings = common.alternate(
            {
                name: functools.partial(side.write, texts, options.words)
                for name, side in sides.items()
            },
            rounds=options.rounds,
            warm_up=1,
            clock=common.clock_of(options),
        )
        for name, timing in timings.items():
            yield {
                "side": name,
                "texts": texts,
                "words_per_second": texts * options.words / timing.median,
                "seconds": timing.median,
                "fastest": timing.fastest,
                "ratio": timings[BASELINE].median / timing.median,
                "weights_megabytes": sides[name].weights(),
                "words_megabytes": sides[name].words,
                "file_megabytes": sides[name].file,
            }


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(threads=1)
    parser.add_argument(
        "--layers", type=common.positive, default=12, metavar="N", help="of the model"
    )
    parser.add_argument(
        "--words", type=common.positive, default=64, metavar="N", help="words of each text"
    )
    parser.add_argument(
        "--texts", type=common.positive, nargs="+", default=TEXTS, metavar="N", help="at a time"
    )
    options = common.parse(parser, arguments)
    if options.quick:
        options.layers, options.words = 1, 5
    sides, missing = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        for number, (name, make) in enumerate(SIDES.items()):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            try:
                sides[name] = make(folder, options)
            except ImportError as error:
                missing[name] = str(error)
        with torch.no_grad():
            table = list(rows(sides, options))
    conditions = common.conditions(
        options,
        packages=("transformers", "llama-cpp-python", "gguf"),
        baseline=BASELINE,
        layers=options.layers,
        words=options.words,
        clock=common.clock_of(options).__name__,
        missing=missing,
        library=loader.description(),
    )
    common.report("language", table, conditions, options)


if __name__ == "__main__":
    main()
