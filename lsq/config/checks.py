"""Checks of fields, and what their docstrings say."""

import ast
import inspect
import math
import textwrap
from dataclasses import fields

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
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number above 0")


def require_share(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} is {value!r}; it must be at least 0 and below 1")


def require_model(model: object) -> None:
    """Refuse what is no model.

    Raises:
        TypeError: it is no torch.nn.Module.
    """
    if isinstance(model, nn.Module):
        return
    kind = type(model).__name__
    # as of a Trainer or a pipeline of transformers
    if isinstance(getattr(model, "model", None), nn.Module):
        raise TypeError(
            f"model is a {kind}; give the model in it, its .model, before the {kind} is made"
        )
    raise TypeError(
        f"model is {model!r:.80}, a {kind}; give a torch.nn.Module, such as what from_pretrained"
        " returns"
    )


def documentation(dataclass: type) -> dict[str, str]:
    """The docstrings that stand under the fields of `dataclass`: field name -> text, "" where there
    is none."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(dataclass))).body
    found = {field.name: "" for field in fields(dataclass)}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        text = following.value if isinstance(following, ast.Expr) else None
        if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Constant):
            found[statement.target.id] = inspect.cleandoc(str(text.value))
    return found


def check_dimension(name: str, value: int) -> None:
    """Refuse a width that int8 products cannot take, naming the next one that they can.

    Raises:
        ValueError: `value` is not a multiple of DIMENSION_MULTIPLE.
    """
    if value % DIMENSION_MULTIPLE:
        larger = -(-value // DIMENSION_MULTIPLE) * DIMENSION_MULTIPLE
        raise ValueError(
            f"{name} is {value}, but int8 products need a multiple of {DIMENSION_MULTIPLE}; use"
            f" {larger}"
        )
