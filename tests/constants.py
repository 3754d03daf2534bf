"""Configurations with other constants of learned clips than those that users have."""

import functools
from dataclasses import fields
from typing import Any

from lsq.config import QuantConfig

CONSTANTS = ("calibration_passes", "clip_step", "percentile", "weight_clip", "activation_clip")


def quant_with(**options) -> QuantConfig:
    """Make a QuantConfig of its fields and of CONSTANTS; clips learn then, unless `clips` is given.

    It is a subclass with these class constants, so that configurations with other ones are other
    keys of caches, and `dataclasses.replace` keeps them.
    """
    constants = tuple((name, options.pop(name)) for name in CONSTANTS if name in options)
    if not constants:
        return QuantConfig(**options)
    if options.get("clips", "auto") == "auto":
        options["clips"] = "learned"
    return _kind(constants)(**options)


@functools.cache
def _kind(constants: tuple[tuple[str, Any], ...]) -> type[QuantConfig]:
    def reduce(self: QuantConfig) -> tuple:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return functools.partial(quant_with, **dict(constants), **given), ()

    return type("QuantConfig", (QuantConfig,), {**dict(constants), "__reduce__": reduce})
