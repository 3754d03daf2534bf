"""What the command lines of several subcommands share."""

import argparse
from argparse import ArgumentParser


def one_line_errors(parser: ArgumentParser) -> None:
    """Let a parser report a mistake in one line, without the usage, which fills screens for fairseq's parsers."""

    def error(message: str) -> None:
        parser.exit(2, f"{parser.prog}: error: {message} (see {parser.prog} --help)\n")

    parser.error = error


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
