"""The builder of layers, which knows how each value is rounded, and the cache of programs.

Products read int8 codes (or int4 weights), decoded values of a FakeQuantize, or floats.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from functools import lru_cache, wraps

import torch

from lsq.config import QuantConfig
from lsq.gemm.cuda import choices
from lsq.ops.fake_quantize import FakeQuantize
from lsq.ops.grouped_product import GroupedCodes, common_group
from lsq.ops.nonlinearity import Activation, Nonlinearity
from lsq.ops.project import Project
from lsq.ops.rounding import Add, Round, unpacked
from lsq.ops.sums import finish_together, start_together
from lsq.program.backend import Backend
from lsq.program.builder import Builder
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.tensor import Kind, VirtualTensor
from lsq.program.values import Coded, Rows
from lsq.quant.numbers import Grain, ScaledFormat

PROGRAMS_KEPT = 512
"""Number of programs kept for each kind of layer; the least recently used goes first."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A value [M, N]: floats and codes that an operation writes, and rows that later ones read."""

    out: VirtualTensor | None
    rounded: Coded | None
    rows: Rows


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """The epilogue of a product: what happens to its sums before they are stored under a name."""

    name: str
    clip: str | None = None
    """Name of the clip that rounds the result; None: it stays a float."""
    row_factor: VirtualTensor | None = None
    """[M], of each row, before it is rounded."""
    activation: Activation = Activation.none
    dropout: float = 0.0
    dtype: torch.dtype = torch.float32
    """dtype of a float result; a GPU stores its own dtype of activations instead."""


class LayerBuilder(Builder):
    """Builds programs of layers: it knows which operations round a value in each format."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._waiting: dict[VirtualTensor, tuple[str, VirtualTensor]] = {}
        """Floats that no operation has written yet -> their clip, and the tensor to decode into."""

    def add(self, operation: Operation) -> Operation:
        super().add(operation)
        for tensor in operation.outputs:
            if tensor in self._waiting:
                self._add_values(tensor, *self._waiting.pop(tensor))
        return operation

    def result(
        self,
        name: str,
        shape: tuple[int, int],
        clip: str | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        floats: bool = False,
        by_row: bool = False,
    ) -> Result:
        """Declare a value [M, N], rounded if `clip` is given; `by_row`: see Builder.coded."""
        rounded = None
        if clip is not None and self.quant.coded:
            rounded = self.coded(clip.removesuffix("_clip"), shape, clip, by_row=by_row)
        out = self.tensor(name, shape, dtype) if floats or rounded is None else None
        if rounded is not None:
            return Result(out=out, rounded=rounded, rows=Rows(coded=rounded))
        values = self._values_of(out, clip)
        if values is not out:
            self._waiting[out] = clip, values
        return Result(out=out, rounded=None, rows=Rows(floats=values))

    def round(self, x: VirtualTensor, clip: str) -> Rows:
        """Round x [M, N] under the clip named `clip`."""
        if self.quant.coded:
            rounded = self.coded(clip.removesuffix("_clip"), x.shape, clip)
            self.add(Round(x=x, rounded=rounded))
            return Rows(coded=rounded)
        values = self._values_of(x, clip)
        if values is not x:
            self._add_values(x, clip, values)
        return Rows(floats=values)

    def _values_of(self, x: VirtualTensor, clip: str | None) -> VirtualTensor:
        """Declare the tensor of x's decoded values; return x if no clip or no format rounds it."""
        if clip is None:
            return x
        name = clip.removesuffix("_clip")
        form = self.quant.activation_form(name)
        values = self.activations[name] = x if form is None else self.like(name + ".decoded", x)
        return values

    def _add_values(self, x: VirtualTensor, clip: str, values: VirtualTensor) -> None:
        form, clipped = self.quant.activation_form(clip.removesuffix("_clip")), None
        if self.backward:
            bits = (-(-math.prod(x.shape) // 8),)
            clipped = self.tensor(values.name + ".clipped", bits, torch.uint8)
        limit = self.parameter(clip, (1,), Kind.ACTIVATION_CLIP, start=self.quant.activation_clip)
        super().add(
            FakeQuantize(
                x=x,
                clip=limit,
                out=values,
                form=form,
                given=form.grain == Grain.TENSOR,
                clipped=clipped,
            )
        )

    def kept_rows(self, tensor: VirtualTensor, scale: VirtualTensor | None) -> Rows:
        """Return rows that an earlier program wrote: codes under a scale, or floats."""
        if not self.quant.coded:
            return Rows(floats=tensor)
        return Rows(coded=Coded(format=self.quant.activations, codes=tensor, scale=scale))

    @property
    def keeps_codes(self) -> bool:
        """Whether the backward pass reads slopes and normalised rows as codes."""
        return self.backward and self.quant.coded

    def nonlinearity(
        self, name: str, shape: tuple[int, int], activation: Activation, dropout: float
    ) -> Nonlinearity | None:
        """Declare activation and dropout of a product [M, N], and what their gradient reads."""
        found = Nonlinearity(activation=activation, dropout=self.dropout(dropout))
        if activation is Activation.none:
            return None if found.dropout is None else found
        if self.backward and activation is Activation.relu:
            bits = (-(-math.prod(shape) // 8),)
            found.positive = self.tensor(name + ".positive", bits, torch.uint8)
        elif self.keeps_codes and activation.bounded_slope:
            found.slope = self.tensor(name + ".slope", shape, torch.int8)
        elif self.backward:
            found.before = self.tensor(name + ".before", shape)
        return found

    # Products

    def project(
        self,
        x: Rows,
        weight: str,
        shape: tuple[int, int],
        end: Epilogue,
        *,
        bias: str | None = None,
        bias_bound: float = 0.0,
        rows: int | None = None,
        accumulates: bool = False,
        **start,
    ) -> Rows:
        """Multiply x [M, K] by the transpose of a weight of `shape` [N, K]; add bias and epilogue.

        `rows` above N pads codes and result. `accumulates`: add the gradient of x to the gradient
        from an earlier product that reads x. `start`: see Builder.weight.
        """
        group = 0 if self.quant.coded else self._group(x, self.quant.weight_form(weight))
        stored = self.weight(weight, shape, rows=rows, group=group, **start)
        groups = self._groups(x, group) if group and stored.group == group else None
        count = x.tensor.shape[0]
        size = (count, rows or shape[0])
        added = self.parameter(bias, shape[:1], Kind.BIAS, bound=bias_bound) if bias else None
        y = self.result(end.name, size, end.clip, dtype=end.dtype)
        self.add(
            Project(
                x=x,
                weight=unpacked(self, stored, count),
                groups=groups,
                bias=added,
                row_factor=end.row_factor,
                out=y.out,
                rounded=y.rounded,
                nonlinearity=self.nonlinearity(end.name, size, end.activation, end.dropout),
                accumulates=accumulates,
            )
        )
        return y.rows

    def _group(self, x: Rows, form: ScaledFormat | None) -> int:
        """Return how many products of x and a weight are summed as integers; 0: floats are."""
        producer = self.producer(x.floats)
        rounded = isinstance(producer, FakeQuantize)
        if form is None or not self.multiplies_groups:
            return 0
        if not rounded and (self.training or self.backward):
            return 0
        return common_group(producer.form if rounded else None, form, x.floats.shape[1]) or 0

    def _groups(self, x: Rows, group: int) -> GroupedCodes | None:
        """Return x [M, K] as int8 codes with scales of groups; None if it is not rounded."""
        producer = self.producer(x.floats)
        if not isinstance(producer, FakeQuantize):
            return None
        if producer.coded is None:
            rows, name, grain = x.floats.shape[0], x.floats.name, producer.form.grain
            producer.coded = GroupedCodes(
                codes=self.tensor(name + ".codes", x.floats.shape, torch.int8),
                group=grain.columns or group,
                scale=self.tensor(name + ".scale", (rows, grain.grid(x.floats.shape)[1])),
            )
        return producer.coded.regrouped(group)

    # Whole passes

    def make_add(self, a: VirtualTensor, b: VirtualTensor, total: VirtualTensor) -> Operation:
        return Add(a=a, b=b, out=total)

    def first_operations(self, forward):
        return start_together(forward) if self._backend.starts_scales else ()

    def last_operations(self, backward):
        return finish_together(backward, self.tensor) if self._backend.leaves_sums else ()


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How a program runs."""

    training: bool
    backward: bool
    backend: Backend
    wanted: frozenset[str] | None = None
    """Names of the inputs and parameters that need a gradient; None: all of them."""

    def builder(
        self, name: str, quant: QuantConfig, kind: Callable[..., LayerBuilder] = LayerBuilder
    ) -> LayerBuilder:
        """Begin the program `name`."""
        return kind(
            name,
            quant,
            training=self.training,
            backward=self.backward if self.wanted is None else self.wanted,
            backend=self.backend,
        )


def cached(build: Callable[..., Program]) -> Callable[..., Program]:
    """Cache programs of `build` by their arguments and by the tuned files in use."""
    signature = inspect.signature(build)

    @lru_cache(maxsize=PROGRAMS_KEPT)
    def kept(chosen, *arguments, **named) -> Program:
        built = build(*arguments, **named)
        built.prepared["call"] = program, signature.bind(*arguments, **named).arguments
        return built

    @wraps(build)
    def program(*arguments, **named) -> Program:
        return kept(choices(), *arguments, **named)

    return program


def call_of(program: Program) -> tuple[Callable[..., Program], dict[str, object]]:
    """Return the `cached` function that built a program, and its arguments by name."""
    return program.prepared["call"]


def in_floats(program: Program) -> Program:
    """Build `program` again in float mode: without codes, and with an unpadded vocabulary."""
    build, arguments = call_of(program)
    return build(**{name: _in_floats(value) for name, value in arguments.items()})


def _in_floats(value: object) -> object:
    if isinstance(value, QuantConfig):
        return replace(value, mode="float")
    if is_dataclass(value) and isinstance(getattr(value, "quant", None), QuantConfig):
        return replace(value, quant=_in_floats(value.quant))
    return value
