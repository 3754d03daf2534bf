"""Which process of which training this is: fairseq's distributed options from torchrun's
environment."""

import os
import sys
from argparse import Namespace
from collections.abc import Mapping

import torch

from lsq.dist import attempts
from lsq.fairseq import architectures

ARCHITECTURE = "lsq_transformer"
"""Default architecture."""
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ONE_MACHINE = (
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "127.0.0.1:0",
    "--local-addr",
    "127.0.0.1",
)
"""torchrun's options for one machine.

Its --standalone waits in vain where localhost or the host has no address.
"""


def on_cpu(args: Namespace) -> bool:
    """Whether this training runs on the CPU."""
    return args.cpu or not torch.cuda.is_available()


def check_precision(args: Namespace) -> None:
    """Refuse what fairseq would fail on, or ignore, on the CPU, and what lsq's models do not take.

    Raises:
        ValueError: --fp16 or --amp without a GPU or for a model of lsq's, or --tpu without its
            library.
    """
    # a checkpoint that is translated with has its own
    architecture = getattr(args, "arch", None) or ""
    reason = "--cpu is given" if args.cpu else "PyTorch sees no GPU here"
    for option in ("fp16", "amp"):
        if not getattr(args, option, False):
            continue
        if architectures.is_ours(architecture):
            raise ValueError(
                f"--{option} is given, but {architecture} computes in int8 and float32; leave it"
                " out"
            )
        if on_cpu(args):
            remedy = "leave it out or use --bf16" if architecture else "leave it out"
            raise ValueError(f"--{option} needs a GPU, but {reason}; {remedy}")
    if args.tpu:
        raise ValueError("--tpu is not supported; leave it out")


def fill_in(args: Namespace, environment: Mapping[str, str] = os.environ) -> None:
    """Set fairseq's distributed options in `args`, in place, so that every process takes part in
    one training.

    Under torchrun they come from its environment. `distributed_world_size` is None where it was not
    given: then there is a process for each GPU, and one on the CPU.

    Raises:
        ValueError: the launch would train nothing, or contradicts torchrun.
    """
    if all(name in environment for name in TORCHRUN):
        _from_torchrun(args, environment)
    elif args.distributed_world_size is None:
        args.distributed_world_size = 1 if on_cpu(args) else torch.cuda.device_count()
    elif args.distributed_world_size > 1 and not args.distributed_no_spawn and on_cpu(args):
        raise ValueError(
            f"--distributed-world-size {args.distributed_world_size} without GPUs would train"
            " nothing; start"
            f" {args.distributed_world_size} processes with torchrun --nproc-per-node"
            f" {args.distributed_world_size} --no-python lsq train ..."
        )
    if on_cpu(args) and args.distributed_backend == "nccl":
        args.distributed_backend = "gloo"


def _from_torchrun(args: Namespace, environment: Mapping[str, str]) -> None:
    world_size, local_rank = int(environment["WORLD_SIZE"]), int(environment["LOCAL_RANK"])
    if args.distributed_world_size not in (None, world_size):
        raise ValueError(
            f"--distributed-world-size {args.distributed_world_size} contradicts torchrun, which"
            " started"
            f" {world_size} processes; leave it out"
        )
    if not on_cpu(args) and local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"torchrun started process {local_rank} of this machine (counted from 0), but PyTorch"
            " sees only"
            f" {torch.cuda.device_count()} GPUs; lower --nproc-per-node, or give --cpu"
        )
    args.distributed_world_size = world_size
    args.device_id = local_rank
    args.distributed_no_spawn = True
    if world_size > 1:
        args.distributed_rank = int(environment["RANK"])
        args.distributed_init_method = attempts.METHOD


def torchrun_command(args: Namespace, arguments: list[str]) -> list[str] | None:
    """The command that starts one process for each GPU, where fairseq would fork them itself; else
    None.

    fairseq's own processes would each get an interrupt twice, from the terminal and when their
    parent ends, and so have no time to write a checkpoint; torchrun's get it once.
    """
    by_fairseq = args.distributed_world_size > 1 and not args.distributed_no_spawn
    if not by_fairseq or args.distributed_init_method is not None or args.distributed_port > 0:
        return None
    processes = min(args.distributed_world_size, torch.cuda.device_count())
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *ONE_MACHINE,
        "--nproc-per-node",
        str(processes),
    ]
    return [*launcher, "-m", "lsq.commands.cli", "train", *arguments]
