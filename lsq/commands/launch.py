"""Device of a training, by --lsq-device, --lsq-activations and fairseq's --cpu, and its processes,
by torchrun's environment."""

import logging
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping

import torch

from lsq.dist import attempts
from lsq.fairseq import architectures, device
from lsq.run.backends import Backend, for_device
from lsq.run.cuda import AbsentGPU, gpu_fault

logger = logging.getLogger(__name__)

ARCHITECTURE = "lsq_transformer"
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ONE_MACHINE = "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1".split()
"""Options in place of torchrun's --standalone, which hangs if a host name has no address."""
DEVICE_OPTIONS = {"lsq_device": "--lsq-device", "lsq_activations": "--lsq-activations"}


def add_device_options(parser: ArgumentParser) -> None:
    parser.add_argument("--lsq-device", choices=device.DEVICES, help=device.DEVICE_HELP)
    parser.add_argument(
        "--lsq-activations", choices=tuple(device.ACTIVATIONS), help=device.ACTIVATIONS_HELP
    )


def planned(args: Namespace) -> Backend:
    """Return the backend to plan a training for, even without its device here; ValueError."""
    given = args.lsq_device or (device.CPU if args.cpu or gpu_fault() else device.CUDA)
    if given == device.CPU:
        device.check(args, on_cpu=True)
        return for_device(torch.device("cpu"))
    return AbsentGPU(
        device.ACTIVATIONS[str(args.lsq_activations or device.DEFAULT_ACTIVATIONS[given])]
    )


def choose_device(args: Namespace, ours: bool) -> None:
    """Set `args.cpu` by the requested device, or else by the best one that works. `ours`: the model
    is of lsq. ValueError: the requested device does not work."""
    given = getattr(args, "lsq_device", None)
    if not ours:
        _choose_for_fairseq(args, given)
        return
    if given is None and not on_cpu(args):
        fault = gpu_fault()
        if fault is not None:
            logger.warning("the GPU stays unused, layers compute on the CPU: %s", fault)
            args.cpu = True
    elif given not in (None, device.CUDA):
        args.cpu = True
    if hasattr(args, "lsq_device"):
        device.check(args, on_cpu=on_cpu(args))


def _choose_for_fairseq(args: Namespace, given: str | None) -> None:
    options = device_options(args)
    if given == device.EMULATOR or "--lsq-activations" in options:
        words = " ".join(f"{option} {value}" for option, value in options.items())
        raise ValueError(f"{words}: only models of lsq take it, and this one is none; leave it out")
    if given == device.CUDA and on_cpu(args):
        fault = (
            "--cpu was given, too; leave one of them out"
            if args.cpu
            else "PyTorch sees no GPU here; leave it out"
        )
        raise ValueError(f"--lsq-device cuda: {fault}")
    args.cpu = args.cpu or given not in (None, device.CUDA)


def device_of(args: Namespace) -> str:
    return args.lsq_device or (device.CPU if on_cpu(args) else device.CUDA)


def device_options(args: Namespace) -> dict[str, str]:
    values = {option: getattr(args, name, None) for name, option in DEVICE_OPTIONS.items()}
    return {option: str(value) for option, value in values.items() if value is not None}


def on_cpu(args: Namespace) -> bool:
    return args.cpu or not torch.cuda.is_available()


def check_precision(args: Namespace) -> None:
    """Raise ValueError for --tpu, and for --fp16 and --amp without a GPU or with a model of lsq."""
    # without --arch, in `lsq generate`, the checkpoint has the architecture
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
    """Set fairseq's distributed options, from torchrun's environment if it is set; ValueError."""
    if all(name in environment for name in TORCHRUN):
        _from_torchrun(args, environment)
    elif args.distributed_world_size is None:
        args.distributed_world_size = 1 if on_cpu(args) else torch.cuda.device_count()
    elif args.distributed_world_size > 1 and not args.distributed_no_spawn and on_cpu(args):
        raise ValueError(
            f"--distributed-world-size {args.distributed_world_size} without GPUs would train"
            f" nothing; start {args.distributed_world_size} processes with torchrun"
            f" --nproc-per-node {args.distributed_world_size} --no-python lsq train ..."
        )
    if on_cpu(args) and args.distributed_backend == "nccl":
        args.distributed_backend = "gloo"


def _from_torchrun(args: Namespace, environment: Mapping[str, str]) -> None:
    world_size, local_rank = int(environment["WORLD_SIZE"]), int(environment["LOCAL_RANK"])
    if args.distributed_world_size not in (None, world_size):
        raise ValueError(
            f"--distributed-world-size {args.distributed_world_size} contradicts torchrun, which"
            f" started {world_size} processes; leave it out"
        )
    if not on_cpu(args) and local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"torchrun started process {local_rank} of this machine (counted from 0), but PyTorch"
            f" sees only {torch.cuda.device_count()} GPUs; lower --nproc-per-node, or give --cpu"
        )
    args.distributed_world_size = world_size
    args.device_id = local_rank
    args.distributed_no_spawn = True
    if world_size > 1:
        args.distributed_rank = int(environment["RANK"])
        args.distributed_init_method = attempts.METHOD


def torchrun_command(args: Namespace, arguments: list[str]) -> list[str] | None:
    """Return the torchrun command that starts a process for each GPU, in place of fairseq's own
    forks. None: fairseq would not fork, or its init method or port is given."""
    by_fairseq = args.distributed_world_size > 1 and not args.distributed_no_spawn
    if not by_fairseq or args.distributed_init_method is not None or args.distributed_port > 0:
        return None
    processes = min(args.distributed_world_size, torch.cuda.device_count())
    launcher = ["-m", "torch.distributed.run", *ONE_MACHINE, "--nproc-per-node", str(processes)]
    return [sys.executable, *launcher, "-m", "lsq.commands.cli", "train", *arguments]
