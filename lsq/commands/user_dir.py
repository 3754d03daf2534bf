"""`lsq user-dir`: the folder to give to fairseq's --user-dir."""

from argparse import Namespace
from pathlib import Path

import lsq
from lsq.commands.options import command_parser


class Options(Namespace):
    """Print the folder for fairseq's --user-dir: fairseq-train --user-dir "$(lsq user-dir)" ..."""


def user_dir() -> Path:
    return Path(lsq.__file__).parent / "fairseq" / "user_dir" / "lsq_fairseq"


def run(arguments: list[str]) -> int:
    command_parser("user-dir", Options).parse_args(arguments)
    print(user_dir())
    return 0
