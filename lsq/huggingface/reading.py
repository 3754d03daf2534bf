"""What modules of transformers are, as lsq's configuration names it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional


def plain_linears(module: nn.Module, *names: str) -> list[nn.Linear]:
    """The torch.nn.Linear children of these names.

    Raises:
        ValueError: one of them is something else, such as a layer with an adapter, or has a forward of its own.
    """
    found = [getattr(module, name) for name in names]
    for name, child in zip(names, found, strict=True):
        if type(child) is not nn.Linear:
            raise ValueError(f"its {name} is a {type(child).__name__}")
        if "forward" in vars(child):
            raise ValueError(f"its {name} has a forward of its own")
    return found


FUNCTIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "squared_relu": lambda x: functional.relu(x).square(),
}
"""Names of LayerConfig.activation."""


def activation_of(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """The name of what a model has as an activation, by its values: transformers has several of each.

    Raises:
        ValueError: an activation that no program has.
    """
    x = torch.linspace(-5, 5, 101)
    with torch.no_grad():
        y = function(x)
        for name, one in FUNCTIONS.items():
            if torch.allclose(one(x), y, rtol=1e-5, atol=1e-6):
                return name
    raise ValueError(f"its activation is {type(function).__name__}; there are {', '.join(FUNCTIONS)}")
