"""Reads what modules of transformers are, in the terms of LayerConfig."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional

from lsq.models.exact import TRUSTED, base_of

Value = TypeVar("Value")


def sources(
    modules: Mapping[str, str | Sequence[str]], *, bias: bool = True, norm_bias: bool = True
) -> dict[str, tuple[str, ...]]:
    """Map the program's parameters of linear layers and norms to paths of the layer's parameters.

    Args:
        modules: names in the program, such as "self_attn.qkv" and "final_layer_norm" -> paths in
            the layer of the module, or of several modules whose weights are joined.
        bias, norm_bias: whether linear layers and norms may have biases.
    """
    parameters = {}
    for name, paths in modules.items():
        paths = [paths] if isinstance(paths, str) else paths
        norm = name.endswith("norm")
        for part in ("weight", "bias") if (norm_bias if norm else bias) else ("weight",):
            parameters[f"{name}{'.' if norm else '_'}{part}"] = tuple(
                f"{path}.{part}" for path in paths
            )
    return parameters


def plain(kind: type[nn.Module], module: nn.Module, *names: str) -> list[nn.Module]:
    """Return the children of these names, which must be of this class.

    Raises:
        ValueError: one of them is something else, such as a layer with an adapter.
    """
    children = [base_of(getattr(module, name)) for name in names]
    for name, child in zip(names, children, strict=True):
        if type(child) is not kind:
            raise ValueError(f"its {name} is a {type(child).__name__}")
    return children


plain_linears = partial(plain, nn.Linear)


def the_same(what: str, values: Iterable[Value]) -> Value | None:
    """Return the value that all of them are; None if there are none.

    Raises:
        ValueError: they differ.
    """
    different = dict.fromkeys(values)
    if len(different) > 1:
        raise ValueError(f"it has different {what}: {', '.join(map(repr, different))}")
    return next(iter(different), None)


def biases(*linears: nn.Module) -> bool:
    """Whether they have biases; raises ValueError if only some have."""
    having = {linear.bias is not None for linear in linears}
    if len(having) > 1:
        raise ValueError("some of its projections have a bias and others have none")
    return having.pop()


def layer_norm_epsilon(*norms: nn.Module) -> float:
    """The epsilon of a layer's norms; raises ValueError if they differ or are something else."""
    for norm in norms:
        if type(norm) is not nn.LayerNorm or norm.weight is None or norm.bias is None:
            raise ValueError(
                f"one of its norms is {norm!r}, and no LayerNorm with a weight and a bias"
            )
    return the_same("epsilons of norms", (norm.eps for norm in norms))


def dropout_of(*dropouts: nn.Dropout) -> float:
    """The probability of dropouts that are one in a program; raises ValueError if they differ."""
    return the_same("dropouts of residuals", (dropout.p for dropout in dropouts))


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
    """Name an activation by its values, since transformers has several classes of each.

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
