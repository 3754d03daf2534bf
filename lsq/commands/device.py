"""Which device a command computes on, from --lsq-device, --lsq-activations and fairseq's --cpu."""

import logging
from argparse import ArgumentParser, Namespace

import torch

from lsq.commands.launch import on_cpu
from lsq.fairseq.device import (
    ACTIVATIONS,
    ACTIVATIONS_HELP,
    CPU,
    CUDA,
    DEFAULT_ACTIVATIONS,
    DEVICE_HELP,
    DEVICES,
    EMULATOR,
    check,
)
from lsq.run.backends import Backend, for_device
from lsq.run.cuda import AbsentGPU, gpu_fault

logger = logging.getLogger(__name__)

OPTIONS = ("--lsq-device", "--lsq-activations")
NAMES = ("lsq_device", "lsq_activations")


def add_options(parser: ArgumentParser) -> None:
    """Add OPTIONS to the parser of a command that is not fairseq's."""
    parser.add_argument(OPTIONS[0], choices=DEVICES, help=DEVICE_HELP)
    parser.add_argument(OPTIONS[1], choices=tuple(ACTIVATIONS), help=ACTIVATIONS_HELP)


def planned(args: Namespace) -> Backend:
    """For what a training with these options would be planned; its device need not be here.

    Raises:
        ValueError: the options contradict each other.
    """
    given = args.lsq_device or (CPU if args.cpu or gpu_fault() else CUDA)
    if given == CPU:
        check(args, on_cpu=True)
        return for_device(torch.device("cpu"))
    return AbsentGPU(ACTIVATIONS[str(args.lsq_activations or DEFAULT_ACTIVATIONS[given])])


def choose(args: Namespace, ours: bool) -> None:
    """Set `cpu` in `args`, in place, so that a model computes on the device that was asked for, or
    on the best one.

    Args:
        args: options of a command, `cpu` among them; tasks of fairseq's own have none of OPTIONS.
        ours: whether the model is of lsq. Others compute where fairseq has it: on a GPU unless
            `cpu` is set.

    Raises:
        ValueError: the device does not work here, or the options contradict each other.
    """
    given = getattr(args, NAMES[0], None)
    if not ours:
        _choose_for_fairseq(args, given)
        return
    if given is None and not on_cpu(args):
        fault = gpu_fault()
        if fault is not None:
            logger.warning("the GPU stays unused, layers compute on the CPU: %s", fault)
            args.cpu = True
    elif given not in (None, CUDA):
        args.cpu = True
    if hasattr(args, NAMES[0]):
        check(args, on_cpu=on_cpu(args))


def _choose_for_fairseq(args: Namespace, given: str | None) -> None:
    options = asked(args)
    if given == EMULATOR or OPTIONS[1] in options:
        words = " ".join(f"{option} {value}" for option, value in options.items())
        raise ValueError(f"{words}: only models of lsq take it, and this one is none; leave it out")
    if given == CUDA and on_cpu(args):
        fault = (
            "--cpu was given, too; leave one of them out"
            if args.cpu
            else "PyTorch sees no GPU here; leave it out"
        )
        raise ValueError(f"--lsq-device cuda: {fault}")
    args.cpu = args.cpu or given not in (None, CUDA)


def used(args: Namespace) -> str:
    """One of DEVICES: where a model computes after `choose`."""
    return args.lsq_device or (CPU if on_cpu(args) else CUDA)


def asked(args: Namespace) -> dict[str, str]:
    """Those of OPTIONS that were given, with their values, as another command takes them."""
    values = {
        option: getattr(args, name, None) for option, name in zip(OPTIONS, NAMES, strict=True)
    }
    return {option: str(value) for option, value in values.items() if value is not None}
