"""A training of two processes of fairseq's, and what each of them ends with."""

import os
from argparse import Namespace
from pathlib import Path

import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils
from fairseq.trainer import Trainer
from fairseq_cli import train

from tests.dist.processes import CONTEXT


def train_by_two(
    folder: Path, arguments: list[str], seconds: float = 100, ddp: str = "pytorch_ddp"
) -> tuple[str, list[dict[str, torch.Tensor]]]:
    """Train with the command line `arguments` of fairseq-train, for at most so many seconds.

    Returns:
        What process 0 printed, and the parameters in the memory of each in the end.

    Raises:
        AssertionError: a process failed; the text is what it printed.
    """
    given = f"""
        --distributed-world-size 2 --distributed-init-method file://{folder}/meeting
        --distributed-no-spawn --distributed-backend gloo --ddp-backend {ddp}
    """.split()
    both = [
        CONTEXT.Process(target=_process, args=(rank, folder, [*arguments, *given]))
        for rank in range(2)
    ]
    for process in both:
        process.start()
    for rank, process in enumerate(both):
        process.join(seconds)
        process.kill()
        assert process.exitcode == 0, (folder / f"{rank}.log").read_text()[-5000:]
    return (folder / "0.log").read_text(), [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def by_processes(args: Namespace) -> Namespace:
    """Options of a training in processes that are started already."""
    args.distributed_init_method, args.distributed_no_spawn = "env://", True
    args.distributed_backend = "gloo"
    return args


def _process(rank: int, folder: Path, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    with (folder / f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    made = []

    class Remembered(Trainer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    train.Trainer = Remembered
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, [*arguments, "--distributed-rank", str(rank)])
    utils.call_main(convert_namespace_to_omegaconf(args), train.main)
    torch.save(made[0].get_model().state_dict(), folder / f"{rank}.pt")
