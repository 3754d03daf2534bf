"""What modules of transformers are, as lsq's configuration names it."""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional

from lsq.models.exact import TRUSTED, base_of

Value = TypeVar("Value")


def plain(kind: type[nn.Module], module: nn.Module, *names: str) -> list[nn.Module]:
    """The children of these names, which are of this class.

    Raises:
        ValueError: one of them is something else, such as a layer with an adapter.
    """
    found = [base_of(getattr(module, name)) for name in names]
    for name, child in zip(names, found, strict=True):
        if type(child) is not kind:
            raise ValueError(f"its {name} is a {type(child).__name__}")
    return found


plain_linears = partial(plain, nn.Linear)


def biases(*linears: nn.Module) -> bool:
    """Whether they have one.

    Raises:
        ValueError: some have, others have not.
    """
    found = {linear.bias is not None for linear in linears}
    if len(found) > 1:
        raise ValueError("some of its projections have a bias and others have none")
    return found.pop()


def layer_norm_epsilon(*norms: nn.Module) -> float:
    """That of a layer's norms.

    Raises:
        ValueError: they have different ones, or are no torch.nn.LayerNorm with a weight and a bias.
    """
    for norm in norms:
        if type(norm) is not nn.LayerNorm or norm.weight is None or norm.bias is None:
            raise ValueError(
                f"one of its norms is {norm!r}, and no LayerNorm with a weight and a bias"
            )
    found = {norm.eps for norm in norms}
    if len(found) > 1:
        raise ValueError(f"its norms have different epsilons: {', '.join(map(str, sorted(found)))}")
    return found.pop()


def dropout_of(*dropouts: nn.Dropout) -> float:
    """The probability of those of a layer's dropouts that a program has one for.

    Raises:
        ValueError: they have different ones.
    """
    found = {one.p for one in dropouts}
    if len(found) > 1:
        raise ValueError(
            f"its dropouts of residuals are different: {', '.join(map(str, sorted(found)))}"
        )
    return found.pop()


def the_same(what: str, values: Sequence[Value]) -> Value | None:
    """The one value that all of them are; None where there are none.

    Raises:
        ValueError: they differ.
    """
    found = dict.fromkeys(values)
    if len(found) > 1:
        raise ValueError(f"it has different {what}: {', '.join(map(repr, found))}")
    return next(iter(found), None)


@lru_cache(maxsize=64)
def reads(forward: Callable, name: str) -> bool:
    """Whether a function, below its decorators, has a name as a constant, as `getattr` takes it."""
    return name in inspect.unwrap(forward).__code__.co_consts


FUNCTIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "squared_relu": lambda x: functional.relu(x).square(),
}
"""Names of LayerConfig.activation."""


def activation_of(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """The name of what a model has as an activation, by its values: transformers has several of
    each.

    Raises:
        ValueError: an activation that no program has.
    """
    defined = (getattr(function, "__module__", None) or "").partition(".")[0]
    if not isinstance(function, nn.Module) and defined not in TRUSTED:
        raise ValueError(f"its activation is a function of {defined or 'its own'}")
    far = [-100.0, -12.0, -7.0, 7.0, 12.0, 100.0]
    x = torch.tensor([*torch.linspace(-5, 5, 101).tolist(), *far], dtype=torch.float32)
    with torch.no_grad():
        y = function(x)
        for name, one in FUNCTIONS.items():
            if torch.allclose(one(x), y, rtol=1e-5, atol=1e-6):
                return name
    raise ValueError(
        f"its activation is {type(function).__name__}; there are {', '.join(FUNCTIONS)}"
    )
