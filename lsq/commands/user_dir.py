"""`lsq user-dir`: the folder to give to fairseq's --user-dir."""

from pathlib import Path

import lsq
from lsq.commands.options import command_parser


def user_dir() -> Path:
    """The folder that fairseq imports lsq's plugin from."""
    return Path(lsq.__file__).parent / "fairseq" / "user_dir" / "lsq_fairseq"


def run(arguments: list[str]) -> int:
    """The subcommand: print the folder."""
    command_parser(
        "user-dir",
        "Print the folder for fairseq's --user-dir:"
        ' fairseq-train --user-dir "$(lsq user-dir)" ...',
    ).parse_args(arguments)
    print(user_dir())
    return 0
