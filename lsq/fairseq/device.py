"""The device of a model: --lsq-device and --lsq-activations, for any task."""

import logging
from dataclasses import dataclass
from typing import Any, Optional

import torch
from fairseq.dataclass import ChoiceEnum
from omegaconf import II
from torch import nn

from lsq.fairseq.gradients import option
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
    " thousands of times as slow, for tests); default: cuda where it works, else cpu"
)
ACTIVATIONS_HELP = "dtype of floats between operations; default: " + ", ".join(
    f"{name} on {device}" for device, name in DEFAULT_ACTIVATIONS.items()
)


@dataclass
class DeviceOptions:
    """Options of the device of layers; the last one is fairseq's own."""

    lsq_device: Optional[ChoiceEnum(DEVICES)] = option(  # noqa: UP045  fairseq cannot read X | None
        None, DEVICE_HELP
    )
    lsq_activations: Optional[ChoiceEnum(tuple(ACTIVATIONS))] = option(  # noqa: UP045
        None, ACTIVATIONS_HELP
    )
    cpu: bool = II("common.cpu")


def check(options: Any, *, on_cpu: bool) -> None:
    """Raise ValueError for DeviceOptions that contradict each other or the machine; `on_cpu`:
    whether fairseq keeps models on the CPU."""
    device = options.lsq_device
    if device == CUDA:
        fault = "--cpu was given, too; leave one of them out" if options.cpu else gpu_fault()
        if fault is not None:
            raise ValueError(f"--lsq-device cuda: {fault}")
    elif device is not None and not on_cpu:
        raise ValueError(
            f"--lsq-device {device} needs fairseq's --cpu as well, because PyTorch sees a GPU; add"
            " it"
        )
    if options.lsq_activations == "bfloat16" and on_cpu and device != EMULATOR:
        raise ValueError(
            "--lsq-activations bfloat16 is for cuda and the emulator, but layers compute on the CPU"
            " here, in float32; leave it out, or give --lsq-device"
        )
    if device == EMULATOR:
        chosen(options)


def chosen(options: Any) -> Backend | None:
    """Return the backend that the options choose; None: the backend of the parameters' device."""
    activations = options.lsq_activations
    if options.lsq_device == EMULATOR:
        dtype = ACTIVATIONS[str(activations or DEFAULT_ACTIVATIONS[EMULATOR])]
        try:
            return backend("emulated", dtype)
        except RuntimeError as error:  # there is no C++ compiler
            raise ValueError(f"--lsq-device emulator: {error}") from error
    if activations is not None and torch.cuda.is_available() and not options.cpu:
        return for_device(torch.device(CUDA), ACTIVATIONS[str(activations)])
    return None


def use(model: nn.Module, target: Backend | None) -> None:
    """Set the backend of the layers of `model`; None: the backend of the parameters' device."""
    for module in model.modules():
        if isinstance(module, ProgramModule):
            module.backend = target


def report(model: nn.Module, options: Any) -> None:
    """Log where the layers of `model` compute, why not on a GPU, and which formats they decode."""
    layer = next((module for module in model.modules() if isinstance(module, ProgramModule)), None)
    if layer is None:
        return
    where, reason = layer.backend or for_device(next(layer.parameters()).device), ""
    if options.lsq_device is None and where.device.type == CPU:
        reason = f": {gpu_fault() or '--cpu was given'}"
    activations = str(where.activations).removeprefix("torch.")
    logger.info("layers compute on %s, activations in %s%s", where.name, activations, reason)
    if (decoded := decoded_summary(model)) is not None:
        logger.info(decoded)
