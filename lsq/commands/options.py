"""What the command lines of several subcommands share."""

import argparse
import difflib
import re
from argparse import ArgumentParser

CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)", re.DOTALL)
MANY_CHOICES = 12


def one_line_errors(parser: ArgumentParser) -> None:
    """Let a parser report a mistake in one line, without the usage, which fills screens for fairseq's parsers."""

    def error(message: str) -> None:
        parser.exit(2, f"{parser.prog}: error: {CHOICE.sub(_few, message)} (see {parser.prog} --help)\n")

    parser.error = error


def _few(found: re.Match) -> str:
    """The words of argparse, but with the nearest choices only where there are many."""
    choices = [choice.strip(" '") for choice in found[2].split(",")]
    if len(choices) <= MANY_CHOICES:
        return found[0]
    nearest = difflib.get_close_matches(found[1], choices)
    return f"invalid choice: '{found[1]}'" + (f"; did you mean {' or '.join(nearest)}?" if nearest else "")


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def seconds(text: str) -> float:
    """A number of seconds above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
