"""Command lines: options as fields of classes, types of values, errors in one line."""

import argparse
import difflib
import inspect
import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

HELP = frozenset(("-h", "--help"))
CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)", re.DOTALL)
MANY_CHOICES = 12
LARGEST_COUNT = 2**22
LONGEST = 1000
"""Most characters of a message."""
PART = re.compile("[a-z0-9]+")
REQUIRED, UNRECOGNIZED = "the following arguments are required: ", "unrecognized arguments: "
DIGITS = re.compile("[0-9]{1,18}")
"""A whole number. int() also takes spaces, underscores and digits of every script."""
SIZES = {"MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1, "": 1}
"""Units of bytes."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Formatter that shows defaults as they are typed, except None, False and empty lists."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


def command_parser(command: str, declared: type[Namespace], **options) -> ArgumentParser:
    """Make the parser of `lsq COMMAND` for a class of options, without abbreviations."""
    parser = ArgumentParser(
        prog=f"lsq {command}",
        description=inspect.getdoc(declared),
        allow_abbrev=False,
        **{"formatter_class": HelpFormatter, **options},
    )
    one_line_errors(parser)
    add_options(parser, declared)
    return parser


def add_options(parser: ArgumentParser, declared: type[Namespace]) -> None:
    """Add an option for every field of a class.

    A field's docstring is the help of its option. A field without a default is required. The fields
    of a base class form a group; the docstring of the base class is its title. A field that ends
    with _ has the option without it: `import_`.

    Annotations are `bool` for switches, `X | None`, `list[X]` for one value or more, and
    `Annotated[X, ...]` with a metavar, a tuple of choices, or a function that makes the value.
    """
    from lsq.config import documentation  # imports torch

    for owner in declared.__mro__:
        if not issubclass(owner, Namespace) or owner is Namespace:
            continue
        group = parser if owner is declared else parser.add_argument_group(inspect.getdoc(owner))
        texts = documentation(owner)
        for name, annotation in inspect.get_annotations(owner).items():
            options = _argument(annotation)
            if not hasattr(declared, name):
                options["required"] = True
            elif annotation is not bool:
                options["default"] = getattr(declared, name)
                if options["default"] == []:
                    options["action"] = "extend"
            group.add_argument(
                "--" + name.rstrip("_").replace("_", "-"),
                help=texts[name].replace("%", "%%"),
                **options,
            )


def add_fields(group: Any, declared: type, names: Iterable[str], prefix: str = "--") -> None:
    """Add options for named fields of a dataclass, without defaults; docstrings are the help."""
    from lsq.config import documentation  # imports torch

    texts = documentation(declared)
    for field in fields(declared):
        if field.name in names:
            text = texts[field.name].replace("%", "%%")
            option = prefix + field.name.replace("_", "-")
            group.add_argument(option, type=field.type, help=text)


def check_there(*paths: Path | None) -> None:
    """Raise FileNotFoundError unless all paths exist; None is left out."""
    for path in filter(None, paths):
        if not path.exists():
            raise FileNotFoundError(2, "is not there", str(path))


def _argument(annotation: Any) -> dict[str, Any]:
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    if get_origin(annotation) in (Union, UnionType):
        return _argument(kinds[0])
    if get_origin(annotation) is list:
        return _argument(kinds[0]) | {"nargs": "+"}
    if get_origin(annotation) is Annotated:
        options = _argument(kinds[0])
        for given in kinds[1:]:
            kind = {str: "metavar", tuple: "choices"}.get(type(given), "type")
            options[kind] = given
        return options
    return {"action": "store_true"} if annotation is bool else {"type": annotation}


def one_line_errors(parser: ArgumentParser) -> None:
    """Make a parser report mistakes in one line, and unknown options before missing ones."""
    parse_known_args, words = parser.parse_known_args, []

    def remember(args: Sequence[str] | None = None, namespace: Namespace | None = None):
        words[:] = sys.argv[1:] if args is None else args
        return parse_known_args(args, namespace)

    def error(message: str) -> None:
        unknown = _unknown(parser, words) if message.startswith((REQUIRED, UNRECOGNIZED)) else []
        if unknown:
            message = (
                UNRECOGNIZED + " ".join(unknown) + _meant(unknown[0], parser._option_string_actions)
            )
        # some types of fairseq's options are named <lambda>
        message = CHOICE.sub(_few, message).replace("<lambda> ", "")
        parser.exit(2, f"{parser.prog}: error: {shortened(message)} (see {parser.prog} --help)\n")

    parser.parse_known_args, parser.error = remember, error


def _unknown(parser: ArgumentParser, words: Sequence[str]) -> list[str]:
    given = words[: words.index("--")] if "--" in words else words
    names = [word.partition("=")[0] for word in given if word.startswith("--") and " " not in word]
    return [name for name in names if name not in parser._option_string_actions]


def shortened(message: str) -> str:
    return (
        message
        if len(message) <= LONGEST
        else f"{message[: LONGEST * 2 // 3]} ... {message[-LONGEST // 3 :]}"
    )


def _few(found: re.Match) -> str:
    choices = [choice.strip(" '") for choice in found[2].split(",")]
    if len(choices) <= MANY_CHOICES:
        return found[0]
    return f"invalid choice: '{found[1]}'" + _meant(found[1], choices)


def _meant(name: str, known: Iterable[str]) -> str:
    nearest = near(name, known)
    return f"; did you mean {' or '.join(nearest)}?" if nearest else ""


def near(name: str, known: Iterable[str]) -> list[str]:
    """Return the names with the parts of `name` in any order, or at most three similar names."""

    def parts(name: str) -> list[str]:
        return sorted(PART.findall(name.lower()))

    bare = {other.lstrip("-"): other for other in known}
    same = [other for other in bare.values() if parts(other) == parts(name)]
    return same or [bare[other] for other in difflib.get_close_matches(name.lstrip("-"), bare)]


def positive(text: str) -> int:
    if not DIGITS.fullmatch(text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def count(text: str) -> int:
    """Convert a number of words, threads and the like; larger numbers would take all memory."""
    number = positive(text)
    if number > LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"{text} is too large; at most {LARGEST_COUNT}")
    return number


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def size(text: str) -> float:
    """Convert a number of bytes, as 300000, 2.5MB, 1GB or 1GiB."""
    unit = next(unit for unit in SIZES if text.endswith(unit))
    try:
        return above(text.removesuffix(unit)) * SIZES[unit]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of bytes above 0, such as 300000, 300kB, 2.5MB or 1GB"
        ) from None


def above(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


File = Annotated[Path, "FILE"]
Folder = Annotated[Path, "DIR"]
AnyPath = Annotated[Path, "PATH"]
Positive = Annotated[int, positive]
Count = Annotated[int, "N", count]
Seconds = Annotated[float, "S", seconds]


def is_given(option: str, words: list[str]) -> bool:
    """Return whether a command line has an option, as `--lr 0.1` or `--lr=0.1`."""
    return any(word.partition("=")[0] == option for word in words)


def is_part_of(path: Path, wholes: Iterable[Path]) -> bool:
    """Return whether a path is one of `wholes` or inside one; links are followed."""
    return any(path.resolve().is_relative_to(whole.resolve()) for whole in wholes)


def check_writable(output: Path, option: str = "--output", *, makes_folders: bool = False) -> None:
    """Raise ValueError for an unwritable output; `makes_folders`: missing folders are allowed."""
    around = [path for path in (output.absolute(), *output.absolute().parents) if path.is_dir()][0]
    if not makes_folders and around not in (output.absolute(), output.absolute().parent):
        raise ValueError(
            f"{option} {output}: there is no folder {output.absolute().parent}; make it first"
        )
    if not os.access(around, os.W_OK | os.X_OK):
        raise ValueError(
            f"{option} {output}: this user may not write into {around}; choose another {option}"
        )


def replaces(output: Path, overwrite: bool) -> bool:
    """Return whether --output exists and will be replaced; ValueError if that is not allowed."""
    check_writable(output)
    if output.exists() and not overwrite:
        raise ValueError(
            f"--output {output} is there already; choose another, or replace it with --overwrite"
        )
    return output.exists()
