"""What the products of a model take in given formats, and budgets of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from lsq.study.modelled import bit_operations, joules

LIMITS = ("bits", "bytes", "operations", "milliseconds", "joules")
"""Fields of Budget that limit something."""
ACTIVATION_BITS = 8
"""Bits of activations that get no format: they are int8 with one scale."""


@dataclass(frozen=True, kw_only=True)
class Multiplication:
    """Weights [N, K] that are multiplied as one, and their input."""

    form: str
    """Format of the weights, as QuantConfig.weight_format names it."""
    outputs: int
    """N"""
    inputs: int
    """K"""
    weight_bits: float
    """Of a value, scales included."""
    activation_bits: float
    rows: float
    """Rows of the input for each item of a loss, such as a word to predict."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a model may take at most; None: any amount. ValueError: a number is not above 0."""

    bits: float | None = None
    """Mean bits of a weight's value, scales included."""
    bytes: float | None = None
    """Bytes of all weights."""
    operations: float | None = None
    """Bit operations of an item: rows x outputs x inputs x bits of weight x bits of activation."""
    milliseconds: float | None = None
    """Of all products of a step of decoding, as this machine takes them (product_times)."""
    joules: float | None = None
    """Of all products of a step, as modelled (lsq.study.modelled)."""
    rows: int = 1
    """Rows of a step, as one row for each text that is decoded."""

    def __post_init__(self) -> None:
        if not (isinstance(self.rows, int) and not isinstance(self.rows, bool) and self.rows > 0):
            raise ValueError(f"rows is {self.rows!r}; it must be a whole number above 0")
        given = {name: getattr(self, name) for name in LIMITS}
        for name, value in given.items():
            number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (number and math.isfinite(value) and value > 0):
                raise ValueError(f"a budget is {name}={value!r}; it must be a number above 0")
        if all(value is None for value in given.values()):
            raise ValueError(f"there is no budget; give {' or '.join(given)}")

    def limits(self, values: int) -> dict[str, float]:
        """Return the most of each name in TAKEN, for weights with so many values."""
        sizes = [one for one in (self.bits and self.bits * values, self.bytes and 8 * self.bytes)]
        size = min((one for one in sizes if one is not None), default=None)
        others = ("operations", "milliseconds", "joules")
        every = {"bits": size, **{name: getattr(self, name) for name in others}}
        return {name: limit for name, limit in every.items() if limit is not None}


Taken = Callable[[Multiplication, int], float]
"""(product, rows of a step) -> what it takes."""
TAKEN: dict[str, Taken] = {
    "bits": lambda one, rows: one.outputs * one.inputs * one.weight_bits,
    "operations": lambda one, rows: bit_operations(
        one.rows, one.outputs, one.inputs, one.weight_bits, one.activation_bits
    ),
    "joules": lambda one, rows: joules(
        rows, one.outputs, one.inputs, one.weight_bits, one.activation_bits
    ),
}
"""What a product takes. Milliseconds are those of a machine; see Allocator."""
SAID: dict[str, Callable[[float, int], str]] = {
    "bits": lambda taken, values: (
        f"{taken / values:.3f} bits of a value or {math.ceil(taken / 8):,} bytes"
    ),
    "operations": lambda taken, values: f"{taken:.4g} bit operations of an item",
    "joules": lambda taken, values: f"{taken:.4g} joules of a step",
    "milliseconds": lambda taken, values: f"{taken:.4g} milliseconds of products",
}
"""What is taken, in words, by weights with so many values."""
