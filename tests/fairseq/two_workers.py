"""Trainings of fairseq's in two processes, and what each of them ends with."""

import io
import logging
from argparse import Namespace

import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils
from fairseq.trainer import Trainer
from fairseq_cli import train

from tests.dist.processes import run


def by_processes(args: Namespace) -> Namespace:
    """Options of a training in processes that are started already."""
    args.distributed_init_method, args.distributed_no_spawn = "env://", True
    args.distributed_backend = "gloo"
    return args


def train_by_two(
    arguments: list[str], seconds: float = 100, ddp: str = "pytorch_ddp"
) -> tuple[str, list[dict[str, torch.Tensor]]]:
    """Train with the command line `arguments` of fairseq-train, for at most so many seconds.

    Returns:
        What process 0 logged, and the parameters in the memory of each in the end.
    """
    (log, first), (_, second) = run(_train, 2, [*arguments, "--ddp-backend", ddp], timeout=seconds)
    return log, [first, second]


def _train(rank: int, arguments: list[str]) -> tuple[str, dict[str, torch.Tensor]]:
    made, log = [], io.StringIO()

    class Remembered(Trainer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    train.Trainer = Remembered
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger().addHandler(logging.StreamHandler(log))
    args = options.parse_args_and_arch(options.get_training_parser(), arguments)
    args.distributed_rank, args.distributed_world_size = rank, 2
    utils.call_main(convert_namespace_to_omegaconf(by_processes(args)), train.main)
    return log.getvalue(), made[0].get_model().state_dict()
