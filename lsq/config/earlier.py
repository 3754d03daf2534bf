"""Fields of configurations of version 0.1 that are renamed or constant now: accepted for one
version, with a warning for each."""

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

CONSTANT = {
    "calibration_passes": 4096,
    "clip_step": 0.002,
    "percentile": 99.99,
    "weight_clip": 1.0,
    "activation_clip": 16.0,
    "backward_dtype": "float32",
}
"""Fields of QuantConfig that cannot be chosen any more, and their values."""
RENAMED = {"weight_init": "clip_init", "activation_init": "clip_init"}
"""Fields of QuantConfig -> what they are now."""
_INIT = "mse"
"""The default of `clip_init`, `weight_init` and `activation_init`."""


def accept(convert: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Callable[[type], type]:
    """Let a dataclass be made with what `convert` makes of the fields that are given."""

    def decorate(config: type) -> type:
        init = config.__init__

        @wraps(init)
        def of_any_version(self, **given):
            init(self, **convert(given))

        config.__init__ = of_any_version
        return config

    return decorate


def without_constants(given: Mapping[str, Any], constants: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without those that are constant now.

    Raises:
        ValueError: one of those has another value.
    """
    for name in constants.keys() & given.keys():
        if given[name] != constants[name]:
            raise ValueError(
                f"{name} is {given[name]!r}, but it is always {constants[name]!r} now: leave it out"
            )
        _warn(f"{name} is always {constants[name]!r} now: leave it out")
    return {name: value for name, value in given.items() if name not in constants}


def of_this_version(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of QuantConfig, some of them by their names of version 0.1.

    Raises:
        ValueError: a field that is constant now has another value, or two that are one now differ.
    """
    fields = without_constants(given, CONSTANT)
    for name in RENAMED.keys() & given.keys():
        value, now = fields.pop(name), RENAMED[name]
        if fields.setdefault(now, value) != value:
            raise ValueError(
                f"{' and '.join(sorted(RENAMED.keys() & given.keys()))} are {now} now, which is"
                f" one for weights and activations: give {now} alone"
            )
        _warn(f"{name} is {now} now, for weights and activations")
    return fields


def of_trained(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of QuantConfig of a training by version 0.1, which may have any value of fields that
    are constant now: they are left out, and clips that learned go on learning."""
    before = {name: given[name] for name in {*CONSTANT, *RENAMED} & given.keys()}
    fields = {name: value for name, value in given.items() if name not in before}
    inits = {before[name] for name in RENAMED if name in before}
    if inits and "clip_init" not in fields:
        fields["clip_init"] = inits.pop() if len(inits) == 1 else _INIT
    defaults = {**CONSTANT, **dict.fromkeys(RENAMED, _INIT)}
    changed = {name for name, value in before.items() if value != defaults[name]}
    # before there was a choice, all clips learned
    earliest, other = "clips" not in given and before, changed - {"backward_dtype"}
    if earliest or (fields.get("clips") == "auto" and other):
        fields["clips"] = "learned"
    for name in CONSTANT.keys() & changed:
        _warn(f"{name} was {before[name]!r} in this training; it is always {CONSTANT[name]!r} now")
    return fields


def _warn(text: str) -> None:
    warnings.warn(text, FutureWarning, stacklevel=4)
