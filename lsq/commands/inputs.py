"""Files that a command line names, looked for before its command is imported: fairseq takes
seconds."""

import importlib.util
import os
from argparse import ArgumentParser
from pathlib import Path

from lsq.commands.options import HELP, is_given
from lsq.text.corpus import check_file

OF_TEXT = ("train-text", "compare")
TEXTS = ("--src", "--tgt", "--valid-src", "--valid-tgt", "--test-src", "--test-tgt")
OF_FAIRSEQ = ("train", "generate")
"""Commands whose first word is the folder of data, unless it is an option."""
MODELS = ("--path", "--lm-path", "--sentencepiece-model")
"""Options of `lsq generate`. Those of `lsq train` are not read where a training goes on."""
PARTS_OF_NAMES = ("--checkpoint-suffix", "--checkpoint-shard-count")
"""With these, --path is the beginning of a name."""


def check(command: str, arguments: list[str]) -> None:
    """Refuse names of files that are not there; other mistakes are left to the command's own
    parser.

    Raises:
        FileNotFoundError, ValueError: a file or a folder is not there, or a file is empty.
    """
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if HELP & set(words):
        return
    if command in OF_TEXT:
        for path in _values(words, *TEXTS).values():
            check_file(Path(path))
    if command in OF_FAIRSEQ:
        if words and not words[0].startswith("-"):
            check_data_folders(words[0])
        check_user_dir(_values(words, "--user-dir").get("--user-dir"))
    if command == "generate" and not any(is_given(option, words) for option in PARTS_OF_NAMES):
        for option, paths in _values(words, *MODELS).items():
            for path in map(Path, paths.split(os.pathsep)):
                if not path.exists():
                    raise FileNotFoundError(f"{option} {path} is not there; check the path")
                if path.is_file() and not path.stat().st_size:
                    raise ValueError(f"{option} {path} is empty; name another file")


def _values(words: list[str], *options: str) -> dict[str, str]:
    """Those of some options that have a value in a command line."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for option in options:
        # without a value, it is the other parser that refuses it
        parser.add_argument(option, dest=option, nargs="?")
    return {
        option: value for option, value in vars(parser.parse_known_args(words)[0]).items() if value
    }


def check_data_folders(data: str) -> None:
    """Raise ValueError unless every folder of binarised data is there."""
    for folder in data.split(os.pathsep):
        if not Path(folder).is_dir():
            raise ValueError(
                f"there is no data folder {folder}; lsq train-text or fairseq-preprocess makes one"
            )


def check_user_dir(folder: str | None) -> None:
    """Raise ValueError unless fairseq will find a folder of plugins: as it is, or beside or in its
    own."""
    installed = importlib.util.find_spec("fairseq")
    of_fairseq = (
        Path(installed.origin).parent if installed is not None and installed.origin else Path()
    )
    roots = (Path(), of_fairseq, of_fairseq.parent)
    if folder is not None and not any((root / folder).is_dir() for root in roots):
        raise ValueError(
            f"--user-dir {folder} is no folder; leave it out for lsq's own plugin, which `lsq"
            " user-dir` names"
        )
