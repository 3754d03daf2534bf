"""The number format that a state dict stores beside clips, and entries of earlier versions."""

import functools
import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import torch

from lsq.config import QuantConfig
from lsq.config.quantization import FAST_FORMATS
from lsq.quant.declared import declare, declared_tables
from lsq.quant.formats import format_choice
from lsq.quant.numbers import all_parts

logger = logging.getLogger(__name__)

NAME = "format"
"""The entry of state dicts: fields of QuantConfig in JSON, each byte a float32, so that averaging
equal state dicts keeps it. Earlier versions stored uint8."""
OF_CLIPS = "calibrated"
"""An entry that all versions put into state dicts with clips."""
DECLARED = "numbers"
"""The key in that entry of the values of numbers that users declare, by name; left out if empty."""
FIELDS = ("weight_format", "activation_format", "weight_granularity", "bits")
"""Fields of QuantConfig that say what clips mean."""
EARLIER = {"weight_format": ("int8", "int4"), "activation_format": ("int8",)}
"""Formats that existed before state dicts stored them."""
DEFAULTS = {field.name: field.default for field in fields(QuantConfig) if field.name in FIELDS}
OUTDATED_CLIPS = ("hidden_clip", "out_clip")
"""Clips of products before their bias, which earlier versions rounded."""
OUTDATED_COUNTS = ("calibrated", "passes")


def save(destination: dict[str, torch.Tensor], prefix: str, quantization: QuantConfig) -> None:
    tables = declared_tables(getattr(quantization, name) for name in FAST_FORMATS)
    destination[prefix + NAME] = entry_of(
        fields_of(quantization) | ({DECLARED: tables} if tables else {})
    )


def entry_of(value: Any) -> torch.Tensor:
    """Return what JSON can hold as an entry of a state dict."""
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.float32, device="cpu")


def value_of(entry: torch.Tensor) -> Any:
    """Return the value in an `entry_of`; TypeError, ValueError or OverflowError: it is damaged."""
    return json.loads(bytes(map(round, entry.tolist())))


def load(state_dict: dict[str, torch.Tensor], prefix: str, quantization: QuantConfig) -> None:
    """Take the format out of a state dict; raises ValueError if it is damaged or differs."""
    entry, ours = state_dict.pop(prefix + NAME, None), fields_of(quantization)
    if entry is not None or prefix + OF_CLIPS in state_dict:
        check(stored(entry, prefix + NAME, ours), ours, prefix)


def fields_of(quantization: QuantConfig) -> dict[str, Any]:
    return {name: getattr(quantization, name) for name in FIELDS}


def stored(entry: torch.Tensor | None, name: str, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in the entry `name`; without an entry, those of earlier versions."""
    if entry is not None:
        return read(entry, name)
    other = [
        field
        for field, known in EARLIER.items()
        if not set(format_choice(ours[field]).formats) <= set(known)
    ]
    return {**ours} | {field: DEFAULTS[field] for field in other}


def read(entry: torch.Tensor, name: str) -> dict[str, Any]:
    """Return the fields in an entry of a state dict, and declare the numbers in it. Raises
    ValueError: it is damaged, or a number is declared here with other values."""
    try:
        found = DEFAULTS | value_of(entry)
        tables = {**found.pop(DECLARED, {})}
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{name} is no format of clips ({error}); load a sound checkpoint"
        ) from None
    for number, values in tables.items():
        declare(number, values, f"the checkpoint ({name})")
    return found


def declare_numbers(state: Mapping[str, torch.Tensor]) -> bool:
    """Declare the numbers in the entries of a state dict; return whether it has any entry. Raises
    ValueError as `read` does."""
    entries = [name for name in state if name.rpartition(".")[2] == NAME]
    for name in entries:
        read(state[name], name)
    return bool(entries)


def check(theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> None:
    """Raise a ValueError if a checkpoint's fields differ from `ours`; its names have `prefix`."""
    other = [name for name in theirs if _canonical(theirs[name]) != _canonical(ours.get(name))]
    if not other:
        return
    kept, here = (
        ", ".join(f"{name}={values.get(name)!r}" for name in other) for values in (theirs, ours)
    )
    kept_in_fairseq = " ".join(f"{option(name, '--lsq-')} {theirs[name]}" for name in other)
    asked = " ".join(f"{option(name)} {ours.get(name)}" for name in other)
    where = f" ({prefix}*)" if prefix else ""
    raise ValueError(
        f"the checkpoint{where} was trained with {kept}, but this model has {here}, with which"
        f" clips mean something else; keep QuantConfig({kept}), in fairseq {kept_in_fairseq}, or"
        f" convert the checkpoint: lsq convert-checkpoint CHECKPOINT --output OTHER {asked}"
    )


def _canonical(value: Any) -> Any:
    """Return a field's value with whole names of formats: int8-row is int8/row."""
    if not isinstance(value, str):
        return value
    return re.sub(r"[^,=]+", lambda name: all_parts(name[0].strip()), value)


def option(field: str, prefix: str = "--") -> str:
    """Return the name of a field on a command line."""
    return prefix + field.replace("_", "-")


def upgrade(state_dict: dict[str, torch.Tensor], prefix: str, declared: Collection[str]) -> None:
    """Drop OUTDATED_CLIPS from a module's state; if it had any, activations are measured again."""
    parts = {name.rpartition(".")[0] for name in declared} - {""}
    outdated = {f"{part}.{name}" for part in parts for name in (*OUTDATED_CLIPS, *OUTDATED_COUNTS)}
    outdated = {*outdated, *OUTDATED_CLIPS} - set(declared)
    found = [name for name in outdated if state_dict.pop(prefix + name, None) is not None]
    if found and prefix + "calibrated" in state_dict:
        _warn()
        state_dict[prefix + "calibrated"] = torch.tensor(False, device="cpu")


@functools.cache  # once, not for every layer
def _warn() -> None:
    logger.warning("a checkpoint of an older version; clips of activations are measured again")
