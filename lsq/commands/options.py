"""Parts of command lines that several subcommands share."""

import argparse
import difflib
import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from pathlib import Path

HELP = frozenset(("-h", "--help"))
CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)", re.DOTALL)
MANY_CHOICES = 12
LARGEST_COUNT = 2**22
LONGEST = 1000
"""Characters of a message."""
PART = re.compile("[a-z0-9]+")
REQUIRED, UNRECOGNIZED = "the following arguments are required: ", "unrecognized arguments: "
"""Beginnings of what argparse says."""
DIGITS = re.compile("[0-9]{1,18}")
"""What is taken for a whole number: int() takes digits of every script, spaces and underscores as
well."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, lists as they are typed, but for None, False and empty lists, which say
    nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


def command_parser(command: str, description: str, **options) -> ArgumentParser:
    """The parser of `lsq COMMAND`: defaults in the help, no abbreviations, errors in one line.

    Args:
        options: further ones of ArgumentParser.
    """
    parser = ArgumentParser(
        prog=f"lsq {command}",
        description=description,
        allow_abbrev=False,
        **{"formatter_class": HelpFormatter, **options},
    )
    one_line_errors(parser)
    return parser


def one_line_errors(parser: ArgumentParser) -> None:
    """Let a parser report a mistake in one line, without the usage, which fills screens for
    fairseq's parsers.

    Options that it does not know come first: without them, others may be missing.
    """
    parse_known_args, words = parser.parse_known_args, []

    def remember(args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None):
        words[:] = sys.argv[1:] if args is None else args
        return parse_known_args(args, namespace)

    def error(message: str) -> None:
        unknown = _unknown(parser, words) if message.startswith((REQUIRED, UNRECOGNIZED)) else []
        if unknown:
            message = (
                UNRECOGNIZED + " ".join(unknown) + _meant(unknown[0], parser._option_string_actions)
            )
        # the names of fairseq's own types
        message = CHOICE.sub(_few, message).replace("<lambda> ", "")
        parser.exit(2, f"{parser.prog}: error: {shortened(message)} (see {parser.prog} --help)\n")

    parser.parse_known_args, parser.error = remember, error


def _unknown(parser: ArgumentParser, words: Sequence[str]) -> list[str]:
    """The options of a command line that its parser does not have."""
    given = words[: words.index("--")] if "--" in words else words
    names = [word.partition("=")[0] for word in given if word.startswith("--") and " " not in word]
    return [name for name in names if name not in parser._option_string_actions]


def shortened(message: str) -> str:
    """A message as it is, or its beginning and end where it quotes a whole line of a file, or lists
    a whole model."""
    return (
        message
        if len(message) <= LONGEST
        else f"{message[: LONGEST * 2 // 3]} ... {message[-LONGEST // 3 :]}"
    )


def _few(found: re.Match) -> str:
    """The words of argparse, but with the nearest choices only where there are many."""
    choices = [choice.strip(" '") for choice in found[2].split(",")]
    if len(choices) <= MANY_CHOICES:
        return found[0]
    return f"invalid choice: '{found[1]}'" + _meant(found[1], choices)


def _meant(name: str, known: Iterable[str]) -> str:
    """Which names a user may have meant, to be put behind a message."""
    nearest = near(name, known)
    return f"; did you mean {' or '.join(nearest)}?" if nearest else ""


def near(name: str, known: Iterable[str]) -> list[str]:
    """The names that are most like one, at most three; those of the same parts in another order, if
    there are any."""
    bare = {one.lstrip("-"): one for one in known}
    same = [one for one in bare.values() if _parts(one) == _parts(name)]
    return same or [bare[one] for one in difflib.get_close_matches(name.lstrip("-"), bare)]


def _parts(name: str) -> list[str]:
    return sorted(PART.findall(name.lower()))


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not DIGITS.fullmatch(text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def count(text: str) -> int:
    """A number of words, threads and such above 0, for argparse; larger ones would take all
    memory."""
    number = positive(text)
    if number > LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"{text} is too large; at most {LARGEST_COUNT}")
    return number


def is_given(option: str, words: list[str]) -> bool:
    """Whether an option is among the words of a command line, as `--lr 0.1` or `--lr=0.1`."""
    return any(word.partition("=")[0] == option for word in words)


def is_part_of(path: Path, wholes: Iterable[Path]) -> bool:
    """Whether a path is one of these, or inside one, whatever links lead there."""
    return any(path.resolve().is_relative_to(whole.resolve()) for whole in wholes)


def check_writable(output: Path, option: str = "--output", *, makes_folders: bool = False) -> None:
    """Refuse an output that cannot be written, before the work that it is for.

    Args:
        output: a file or a folder, there or not.
        option: by which it was given.
        makes_folders: the command makes the folders around it where they are missing.

    Raises:
        ValueError: there is no folder for it, or this user may not write there.
    """
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
    """Whether there is something at --output that will be replaced.

    Raises:
        ValueError: there is, and `overwrite` is not wanted; or see `check_writable`.
    """
    check_writable(output)
    if output.exists() and not overwrite:
        raise ValueError(
            f"--output {output} is there already; choose another, or replace it with --overwrite"
        )
    return output.exists()


def seconds(text: str) -> float:
    """A number of seconds above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
