"""`lsq user-dir`: the folder to give to fairseq's --user-dir."""

from argparse import Namespace
from pathlib import Path

import lsq
from lsq.commands.options import command_parser


class Options(Namespace):
    """Print the folder for fairseq's --user-dir: fairseq-train --user-dir "$(lsq user-dir)" ..."""


def user_dir() -> Path:
    """Return the folder that fairseq imports lsq's plugin from."""
    return Path(lsq.__file__).parent / "fairseq" / "user_dir" / "lsq_fairseq"


def run(arguments: list[str]) -> int:
    """Print the folder."""
    command_parser("user-dir", Options).parse_args(arguments)
    print(user_dir())
    return 0
