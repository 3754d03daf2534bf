"""The table of fused operations: one name, one reference, one implementation per device.

A reference is plain PyTorch: it takes the inputs, returns the outputs, and is what every other
implementation is tested against. A device implementation takes the inputs, then the outputs, already allocated, then
its scratch memory, if it wants any: `cpu` writes into them at once, `cuda` returns the launches and products
(lsq.csrc.launch) that will, so that many operations can be replayed as one list. `differentiate` appends the
operations of the backward pass to a program.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lsq.csrc import loader


@dataclass(frozen=True, kw_only=True)
class OpDefinition:
    """A fused operation.

    An operation that rounds its result also has `unquantized`, which takes the same arguments as
    `reference` and returns the float values that are about to be rounded; calibration measures those.
    """

    name: str
    reference: Callable
    cpu: Callable
    cuda: Callable | None = None
    """Takes what `cpu` takes and returns a list of lsq.csrc.launch.Launch and Product. Activations and their gradients
    may be float32, bfloat16 or float16 there; arithmetic is float32, and every result is rounded once."""
    differentiate: Callable | None = None
    unquantized: Callable | None = None
    scratch: Callable | None = None
    """(shape, dtype) of each tensor that `cpu` needs for itself while it runs.

    Takes what `reference` takes and looks at shapes and dtypes alone. No size may fall when a dimension grows.
    """
    cuda_scratch: Callable | None = None
    """The same for `cuda`."""
    recompute: bool = False
    """Whether the backward pass computes the outputs again instead of saving them."""


_DEFINITIONS: dict[str, OpDefinition] = {}


def register(definition: OpDefinition) -> OpDefinition:
    """Add an operation to the table.

    Raises:
        ValueError: the name is taken.
    """
    if definition.name in _DEFINITIONS:
        raise ValueError(f"operation {definition.name!r} is already registered")
    _DEFINITIONS[definition.name] = definition
    return definition


def definition(name: str) -> OpDefinition:
    """The operation called `name`.

    Raises:
        KeyError: there is none.
    """
    return _DEFINITIONS[name]


def names() -> list[str]:
    """All registered names, sorted."""
    return sorted(_DEFINITIONS)


def fused_available() -> bool:
    """Whether the fused loops can run here; otherwise every operation runs its reference (said once)."""
    return loader.available()
