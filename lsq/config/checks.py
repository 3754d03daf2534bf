"""Checks of fields, docstrings of fields, and fields of version 0.1."""

import ast
import inspect
import math
import textwrap
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import nn

DIMENSION_MULTIPLE = 16
"""Inner dimensions of int8 products must be multiples of this (16-byte rows; as cuBLASLt and VNNI
want them)."""


def require_choice(name: str, value, allowed) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")


def require_positive(name: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value!r}; it must be a finite number above 0")


def require_whole(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number above 0")


def require_share(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} is {value!r}; it must be at least 0 and below 1")


def require_model(model: object) -> None:
    """Raise a TypeError unless `model` is a torch.nn.Module."""
    if isinstance(model, nn.Module):
        return
    kind = type(model).__name__
    # such as a Trainer or a pipeline of transformers
    if isinstance(getattr(model, "model", None), nn.Module):
        raise TypeError(
            f"model is a {kind}; give the model in it, its .model, before the {kind} is made"
        )
    raise TypeError(
        f"model is {model!r:.80}, a {kind}; give a torch.nn.Module, such as what from_pretrained"
        " returns"
    )


def documentation(declared: type) -> dict[str, str]:
    """Map the fields of a class to the docstrings under them; "" without one."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(declared))).body
    texts = {}
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            text = following.value if isinstance(following, ast.Expr) else None
            is_text = isinstance(text, ast.Constant)
            texts[statement.target.id] = inspect.cleandoc(str(text.value)) if is_text else ""
    return texts


def check_dimension(name: str, value: int) -> None:
    """Raise a ValueError with the next multiple unless DIMENSION_MULTIPLE divides a width."""
    if value % DIMENSION_MULTIPLE:
        larger = -(-value // DIMENSION_MULTIPLE) * DIMENSION_MULTIPLE
        raise ValueError(
            f"{name} is {value}, but int8 products need a multiple of {DIMENSION_MULTIPLE}; use"
            f" {larger}"
        )


def accept(convert: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Callable[[type], type]:
    """Decorate a dataclass: `convert` turns the fields that are given into those of the class."""

    def decorate(config: type) -> type:
        init = config.__init__

        @wraps(init)
        def of_any_version(self, **given):
            init(self, **convert(given))

        config.__init__ = of_any_version
        return config

    return decorate


def without_constants(given: Mapping[str, Any], constants: Mapping[str, Any]) -> dict[str, Any]:
    """Drop fields that are constant now, with a warning; ValueError if the value is another."""
    for name in constants.keys() & given.keys():
        if given[name] != constants[name]:
            raise ValueError(
                f"{name} is {given[name]!r}, but it is always {constants[name]!r} now: leave it out"
            )
        warn(f"{name} is always {constants[name]!r} now: leave it out")
    return {name: value for name, value in given.items() if name not in constants}


def under_new_names(given: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields under their new names; ValueError if old and new name are given."""
    fields = dict(given)
    for name in renamed.keys() & given.keys():
        now = renamed[name]
        if now in given:
            raise ValueError(f"{name} and {now} are given, which are one field: give {now} alone")
        fields[now] = fields.pop(name)
        warn(f"{name} is {now} now")
    return fields


def warn(text: str) -> None:
    warnings.warn(text, FutureWarning, stacklevel=4)
