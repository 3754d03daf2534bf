"""`lsq doctor`: what this machine can do, and what to install for more."""

from argparse import ArgumentParser

from lsq import doctor
from lsq.commands.options import one_line_errors


def run(arguments: list[str]) -> int:
    """The subcommand: print the report; the exit status is lsq.doctor's."""
    parser = ArgumentParser(
        prog="lsq doctor",
        description="Say what this machine can do, which int8 path runs here, and what to install for more.",
        allow_abbrev=False,
    )
    one_line_errors(parser)
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return doctor.run(as_json=parser.parse_args(arguments).json)
