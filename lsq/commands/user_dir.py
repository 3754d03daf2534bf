"""`lsq user-dir`: the folder to give to fairseq's --user-dir."""

from argparse import ArgumentParser
from pathlib import Path

import lsq
from lsq.commands.options import one_line_errors


def user_dir() -> Path:
    """The folder that fairseq imports lsq's plugin from."""
    return Path(lsq.__file__).parent / "fairseq" / "user_dir" / "lsq_fairseq"


def run(arguments: list[str]) -> int:
    """The subcommand: print the folder."""
    parser = ArgumentParser(
        prog="lsq user-dir",
        description="Print the folder for fairseq's --user-dir: fairseq-train --user-dir \"$(lsq"
        ' user-dir)" ...',
        allow_abbrev=False,
    )
    one_line_errors(parser)
    parser.parse_args(arguments)
    print(user_dir())
    return 0
