"""A module computes where its parameters are, and its inputs must be there, too."""

from collections.abc import Mapping

import torch
from torch import nn


def check_devices(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
    """Refuse inputs that are elsewhere; nothing is copied behind anyone's back.

    Raises:
        ValueError: an input is on another device than the parameters of `module`.
    """
    device = next(module.parameters()).device
    for name, tensor in inputs.items():
        if tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device}, but the parameters of this {type(module).__name__}"
                f" are on {device}; "
                "move one of the two with .to()"
            )
