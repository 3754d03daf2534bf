"""What the command lines of several subcommands share."""

import argparse
import difflib
import re
from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path

CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)", re.DOTALL)
MANY_CHOICES = 12
LARGEST_COUNT = 2**22
LONGEST = 1000
"""Characters of a message."""
DIGITS = re.compile("[0-9]{1,18}")
"""What is taken for a whole number: int() takes digits of every script, spaces and underscores as well."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, lists as they are typed, but for None, False and empty lists, which say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


def one_line_errors(parser: ArgumentParser) -> None:
    """Let a parser report a mistake in one line, without the usage, which fills screens for fairseq's parsers."""

    def error(message: str) -> None:
        message = CHOICE.sub(_few, message).replace("<lambda> ", "")  # the names of fairseq's own types
        parser.exit(2, f"{parser.prog}: error: {shortened(message)} (see {parser.prog} --help)\n")

    parser.error = error


def shortened(message: str) -> str:
    """A message as it is, or its beginning and end where it quotes a whole line of a file, or lists a whole model."""
    return message if len(message) <= LONGEST else f"{message[: LONGEST * 2 // 3]} ... {message[-LONGEST // 3 :]}"


def _few(found: re.Match) -> str:
    """The words of argparse, but with the nearest choices only where there are many."""
    choices = [choice.strip(" '") for choice in found[2].split(",")]
    if len(choices) <= MANY_CHOICES:
        return found[0]
    nearest = difflib.get_close_matches(found[1], choices)
    return f"invalid choice: '{found[1]}'" + (f"; did you mean {' or '.join(nearest)}?" if nearest else "")


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not DIGITS.fullmatch(text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def count(text: str) -> int:
    """A number of words, threads and such above 0, for argparse; larger ones would take all memory."""
    number = positive(text)
    if number > LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"{text} is too large; at most {LARGEST_COUNT}")
    return number


def is_part_of(path: Path, wholes: Iterable[Path]) -> bool:
    """Whether a path is one of these, or inside one, whatever links lead there."""
    return any(path.resolve().is_relative_to(whole.resolve()) for whole in wholes)


def replaces(output: Path, overwrite: bool) -> bool:
    """Whether there is something at --output that will be replaced.

    Raises:
        ValueError: there is, and `overwrite` is not wanted; or there is no folder for it.
    """
    if not output.absolute().parent.is_dir():
        raise ValueError(f"--output {output}: there is no folder {output.absolute().parent}; make it first")
    if output.exists() and not overwrite:
        raise ValueError(f"--output {output} is there already; choose another, or replace it with --overwrite")
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
