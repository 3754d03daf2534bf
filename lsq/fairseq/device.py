"""The device of a model: --lsq-device and --lsq-activations, for any task."""

import logging
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from fairseq.dataclass import ChoiceEnum
from omegaconf import II
from torch import nn

from lsq.layers import ProgramModule
from lsq.layers.model_formats import decoded_summary
from lsq.run.backends import Backend, backend, for_device
from lsq.run.cuda import gpu_fault

logger = logging.getLogger(__name__)

CPU, CUDA, EMULATOR = DEVICES = ("cpu", "cuda", "emulator")
ACTIVATIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
DEFAULT_ACTIVATIONS = {CUDA: "bfloat16", EMULATOR: "float32"}
DEVICE_HELP = (
    "where layers of lsq compute: cpu, cuda (a GPU), or emulator (a GPU's kernels on the CPU,"
    " thousands of times as "
    "slow, for tests); default: cuda where it works, else cpu"
)
ACTIVATIONS_HELP = "dtype of floats between operations; default: " + ", ".join(
    f"{name} on {device}" for device, name in DEFAULT_ACTIVATIONS.items()
)


@dataclass
class DeviceOptions:
    """Options of the place where layers compute; the last one is fairseq's own."""

    lsq_device: Optional[ChoiceEnum(DEVICES)] = field(  # noqa: UP045  fairseq cannot read X | None
        default=None, metadata={"help": DEVICE_HELP}
    )
    lsq_activations: Optional[ChoiceEnum(tuple(ACTIVATIONS))] = field(  # noqa: UP045
        default=None, metadata={"help": ACTIVATIONS_HELP}
    )
    cpu: bool = II("common.cpu")


def check(options: Any, *, on_cpu: bool) -> None:
    """Refuse options that contradict each other, or the machine.

    Args:
        options: DeviceOptions, or a namespace that has them.
        on_cpu: whether fairseq keeps models on the CPU: it was told to, or PyTorch sees no GPU.

    Raises:
        ValueError: names what was given and what to do.
    """
    device, activations = options.lsq_device, options.lsq_activations
    if device == CUDA:
        fault = "--cpu was given, too; leave one of them out" if options.cpu else gpu_fault()
        if fault is not None:
            raise ValueError(f"--lsq-device cuda: {fault}")
    elif device is not None and not on_cpu:
        raise ValueError(
            f"--lsq-device {device} needs fairseq's --cpu as well, because PyTorch sees a GPU; add"
            " it"
        )
    if activations == "bfloat16" and on_cpu and device != EMULATOR:
        raise ValueError(
            "--lsq-activations bfloat16 is for cuda and the emulator, but layers compute on the CPU"
            " here, in float32; "
            "leave it out, or give --lsq-device"
        )
    if device == EMULATOR:
        emulated(options)


def emulated(options: Any) -> Backend:
    """The emulator's backend.

    Raises:
        ValueError: there is no C++ compiler.
    """
    try:
        return backend(
            "emulated", ACTIVATIONS[str(options.lsq_activations or DEFAULT_ACTIVATIONS[EMULATOR])]
        )
    except RuntimeError as error:
        raise ValueError(f"--lsq-device emulator: {error}") from error


def place(model: nn.Module, options: Any) -> None:
    """Let the layers of `model` compute as the options say; without any, where their parameters
    are.

    Raises:
        ValueError: the emulator was asked for, and there is no C++ compiler.
    """
    if options.lsq_device == EMULATOR:
        use(model, emulated(options))
    elif options.lsq_activations is not None and torch.cuda.is_available() and not options.cpu:
        use(model, for_device(torch.device(CUDA), ACTIVATIONS[str(options.lsq_activations)]))


def use(model: nn.Module, chosen: Backend) -> None:
    """Let the layers of `model` compute on a backend."""
    for module in model.modules():
        if isinstance(module, ProgramModule):
            module.backend = chosen


def report(model: nn.Module, options: Any) -> None:
    """Log where the layers of `model` compute, if it has any, and why not on a GPU where nothing
    was asked for; and what they decode.
    """
    layer = next((module for module in model.modules() if isinstance(module, ProgramModule)), None)
    if layer is None:
        return
    where = layer.backend or for_device(next(layer.parameters()).device)
    activations = str(where.activations).removeprefix("torch.")
    reason = (
        f": {gpu_fault() or '--cpu was given'}"
        if options.lsq_device is None and where.device.type == CPU
        else ""
    )
    logger.info("layers compute on %s, activations in %s%s", where.name, activations, reason)
    if (decoded := decoded_summary(model)) is not None:
        logger.info(decoded)
