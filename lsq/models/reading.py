"""Reading of LayerConfig's fields from modules of transformers and PyTorch."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional

from lsq.models.exact import TRUSTED, base_of, module_at

Value = TypeVar("Value")
Modules = Mapping[str, str | Sequence[str]]
"""Linear layers and norms of a program -> paths of the modules that each of them joins."""
Attributes = Mapping[str, tuple[Callable[[nn.Module], object], bool]]
"""Field of LayerConfig -> a function that reads it from a layer, and if it reads several values."""
HEADS = ("qkv", "query", "key_value")
LABELS = {
    "head_width": "widths of heads",
    "dropout": "dropouts of residuals",
    "attention_dropout": "dropouts of attention",
    "softmax_scale": "factors of scores",
    "layer_norm_epsilon": "epsilons of norms",
    "qk_norm": "epsilons of norms of heads",
}


def sources(
    modules: Modules, *, bias: bool = True, norm_bias: bool = True
) -> dict[str, tuple[str, ...]]:
    """Map the program's parameters in `modules` to paths of the layer's, biases if allowed."""
    parameters = {}
    for name, paths in modules.items():
        norm = name.endswith("norm")
        for part in ("weight", "bias") if (norm_bias if norm else bias) else ("weight",):
            parameters[f"{name}{'.' if norm else '_'}{part}"] = tuple(
                f"{path}.{part}" for path in _several(paths)
            )
    return parameters


def at(**paths: str | Sequence[str]) -> Attributes:
    """Make Attributes from paths of a layer's attributes; several for one field must be equal."""
    several = {field: _several(each) for field, each in paths.items()}
    return {field: (attrgetter(*each), len(each) > 1) for field, each in several.items()}


def _several(paths: str | Sequence[str]) -> Sequence[str]:
    return [paths] if isinstance(paths, str) else paths


def read(layer: nn.Module, attributes: Attributes) -> dict[str, object]:
    """Read fields of LayerConfig; raises ValueError if attributes of one field differ."""
    return {
        field: the_same(field, get(layer)) if several else get(layer)
        for field, (get, several) in attributes.items()
    }


def the_same(field: str, values: Iterable[Value]) -> Value | None:
    """Return the value that all `values` equal, None without any; ValueError if they differ."""
    different = dict.fromkeys(values)
    if len(different) > 1:
        label = LABELS.get(field, field)
        raise ValueError(f"it has different {label}: {', '.join(map(repr, different))}")
    return next(iter(different), None)


def shape_of(layer: nn.Module, modules: Modules) -> dict[str, object]:
    """Read widths, biases and layout of modules; raises ValueError if no program has them."""
    there: dict[str, list[nn.Module]] = {}
    for name, paths in modules.items():
        found = [module_at(layer, path) for path in _several(paths)]
        if None not in found:
            there[name] = list(map(base_of, found))
    for norm in (one for name, every in there.items() if name.endswith("norm") for one in every):
        if isinstance(norm, nn.LayerNorm) and (norm.weight is None or norm.bias is None):
            raise ValueError(
                f"one of its norms is {norm!r}, and no LayerNorm with a weight and a bias"
            )
    linears = {name: every for name, every in there.items() if not name.endswith("norm")}
    heads = [one for name, every in linears.items() if name.endswith(HEADS) for one in every]
    others = [one for name, every in linears.items() if not name.endswith(HEADS) for one in every]
    in_out = {not isinstance(one, nn.Linear) for one in (*heads, *others)}
    if len(in_out) > 1:
        raise ValueError("some of its projections are a torch.nn.Linear and others are not")
    gated = "feed_forward.gate" in linears
    (inner,) = linears["feed_forward.gate" if gated else "feed_forward.fc1"]
    feed_forward, hidden = inner.weight.shape[:: -1 if True in in_out else 1]
    shape = {"hidden": hidden, "feed_forward": feed_forward, "gated": gated}
    shape |= {"in_out": True in in_out, "bias": _biased(others)}
    return shape | ({"head_bias": _biased(heads)} if heads else {})


def _biased(linears: list[nn.Module]) -> bool:
    having = {linear.bias is not None for linear in linears}
    if len(having) > 1:
        raise ValueError("some of its projections have a bias and others have none")
    return having.pop()


@lru_cache(maxsize=64)
def reads(forward: Callable, name: str) -> bool:
    """Whether a function's code, without decorators, has a constant `name`, as for `getattr`."""
    return name in inspect.unwrap(forward).__code__.co_consts


FUNCTIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "squared_relu": lambda x: functional.relu(x).square(),
}


def activation_of(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """Return the name of an activation, found by its values; ValueError if no program has it."""
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
