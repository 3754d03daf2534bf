"""`lsq train` in which a process gets a signal: tests.commands.dying NUMBER RANK UPDATES."""

import os
import sys

from fairseq.trainer import Trainer

from lsq.commands import cli


def main(number: int, rank: int, updates: int, arguments: list[str]) -> int:
    """In the first attempt, send signal `number` to process `rank` after so many updates."""
    step, first = Trainer.train_step, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    def train_step(trainer, samples, raise_oom=False):
        if first and int(os.environ["RANK"]) == rank and trainer.get_num_updates() == updates:
            os.kill(os.getpid(), number)
        return step(trainer, samples, raise_oom)

    Trainer.train_step = train_step
    return cli.main(["train", *arguments])


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4]), sys.argv[4:]))
