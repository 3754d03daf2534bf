"""Options that `lsq translate` and `lsq serve` share: the model, and the search."""

import os
from argparse import SUPPRESS, ArgumentParser, Namespace
from dataclasses import fields, replace
from pathlib import Path

import torch

from lsq.commands.options import count
from lsq.commands.translator import Translator
from lsq.config import documentation
from lsq.serving.search_options import SearchOptions
from lsq.serving.translator import BATCH_TOKENS, DEVICES, LONG_LINES

SEARCH = tuple(fields(SearchOptions))


def add_model(parser: ArgumentParser) -> None:
    """Add the options that say which model translates, and on what."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="PATH",
        help="a run of `lsq train-text` (runs/mine/int8, or runs/mine with one run in it), a file"
        " of `lsq export --to lsq`, or a checkpoint with --data and --sentencepiece-model",
    )
    model.add_argument(
        "--data", type=Path, metavar="DIR", help="of a checkpoint: the folder of its dict.*.txt"
    )
    model.add_argument(
        "--sentencepiece-model",
        type=Path,
        metavar="FILE",
        help="of a checkpoint: its subwords; without it, lines are words of its dictionaries with"
        " spaces between them",
    )
    model.add_argument(
        "--device",
        choices=tuple(DEVICES),
        default="cpu",
        help="where it computes; emulator: a GPU's kernels on the CPU, thousands of times as slow,"
        " for tests",
    )
    model.add_argument(
        "--threads", type=count, help="of the processor (default: as PyTorch chooses)"
    )
    model.add_argument(
        "--batch-tokens",
        type=count,
        default=BATCH_TOKENS,
        help="words of sentences that are translated together; their hypotheses are limited in"
        " proportion",
    )
    model.add_argument(
        "--long-lines",
        choices=tuple(LONG_LINES),
        default="cut",
        help="treatment of lines that are too long for the model: cut translates them in parts,"
        " skip leaves them empty, copy copies them as they are, refuse ends with an error",
    )


def add_search(parser: ArgumentParser) -> None:
    """Add an option for every field of SearchOptions; those that are not given are missing in the
    namespace."""
    search = parser.add_argument_group("search", argument_default=SUPPRESS)
    texts = documentation(SearchOptions)
    for field in SEARCH:
        option, text = "--" + field.name.replace("_", "-"), texts[field.name].replace("%", "%%")
        if field.name == "normalize_scores":
            search.add_argument(
                "--unnormalized", dest=field.name, action="store_false", help="Scores are sums."
            )
        elif field.type is bool:
            search.add_argument(option, action="store_true", help=text)
        else:
            of_run = field.name in ("beam", "max_len_b")
            default = "as the run translated its test set" if of_run else field.default
            search.add_argument(
                option, type=field.type, help=f"{text or 'See --max-len-b.'} Default: {default}."
            )


def translator_of(given: Namespace) -> Translator:
    """Make the translator that the options of `add_model` describe.

    Raises:
        FileNotFoundError, ValueError: see `Translator`; or there are not so many cores.
    """
    cores = os.cpu_count() or 1
    if given.threads is not None:
        if given.threads > cores:
            raise ValueError(
                f"--threads is {given.threads}, and this machine has {cores} cores; give {cores} at"
                " most"
            )
        torch.set_num_threads(given.threads)
    return Translator(
        given.model,
        data=given.data,
        sentencepiece_model=given.sentencepiece_model,
        batch_tokens=given.batch_tokens,
        long_lines=given.long_lines,
        device=given.device,
    )


def search_options(given: Namespace, defaults: SearchOptions) -> SearchOptions:
    """Replace defaults by the options of `add_search`; ValueError if they are not allowed."""
    values = vars(given)
    chosen = {field.name: values[field.name] for field in SEARCH if field.name in values}
    return replace(defaults, **chosen)
