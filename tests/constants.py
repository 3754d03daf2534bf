"""QuantConfig(calibration_passes=2) in tests: constants of learned clips that users cannot choose.

Each choice is a subclass of QuantConfig with other class constants, so that configurations with
different ones are different keys of caches, and `dataclasses.replace` keeps them.
"""

import functools
from typing import Any

from lsq.config import QuantConfig

CONSTANTS = ("calibration_passes", "clip_step", "percentile", "weight_clip", "activation_clip")
_init = QuantConfig.__init__


@functools.cache
def _with(constants: tuple[tuple[str, Any], ...]) -> type:
    def reduce(self: QuantConfig) -> tuple:
        return _unpickled, (constants, vars(self))

    return type("QuantConfig", (QuantConfig,), {**dict(constants), "__reduce__": reduce})


def _unpickled(constants: tuple[tuple[str, Any], ...], fields: dict[str, Any]) -> QuantConfig:
    made = object.__new__(_with(constants))
    vars(made).update(fields)
    return made


def _of_tests(self: QuantConfig, **given) -> None:
    chosen = tuple((name, given.pop(name)) for name in CONSTANTS if name in given)
    if chosen:
        object.__setattr__(self, "__class__", _with(chosen))
        if given.get("clips", "auto") == "auto":
            given["clips"] = "learned"
    _init(self, **given)


def let_tests_choose() -> None:
    """Take constants as fields from now on; processes that tests start call it by importing
    `tests`."""
    QuantConfig.__init__ = _of_tests
