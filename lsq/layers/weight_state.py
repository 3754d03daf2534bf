"""The codes of a module's weights, and when they are made anew."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor, nn

from lsq.layers.coded_weight import CodedWeight, Codes
from lsq.ops.fake_quantize import decode_weight, pack_weight
from lsq.ops.rounding import RoundWeight
from lsq.program.declare import NOWHERE
from lsq.program.program import Program
from lsq.program.values import Weight
from lsq.quant import WeightFormat
from lsq.quant.numbers import ScaledFormat
from lsq.run.backends import Backend
from lsq.run.frames import Slot
from lsq.run.parameter_state import Stamp, WeightCodes, checksum, state_of

if TYPE_CHECKING:
    from lsq.layers.repeated import RepeatedPass


MOST_REPEATED = 8
"""Programs whose last pass a module keeps: one for each size of its batches."""


@dataclass(frozen=True, eq=False)
class RoundedWeight:
    """A weight that a program reads rounded."""

    virtual: Weight
    name: str
    clip: str
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    """Names, shapes and dtypes of the program's inputs that are made from it."""
    names: frozenset[str]

    @property
    def by_optimizers(self) -> bool:
        """Whether an optimizer can write the codes."""
        virtual = self.virtual
        return virtual.codes is not None and not (virtual.in_out or virtual.averaged)


def rounded_weights(program: Program) -> tuple[RoundedWeight, ...]:
    """List the weights that a program reads rounded, looked up once."""
    found = program.prepared.get("rounded weights")
    if found is None:
        found = program.prepared["rounded weights"] = tuple(
            RoundedWeight(
                virtual=virtual,
                name=virtual.values.name,
                clip=virtual.clip.name,
                tensors=tuple((one.name, one.shape, one.dtype) for one in virtual.written),
                names=frozenset(one.name for one in virtual.written),
            )
            for virtual in program.weights.values()
            if virtual.written
        )
    return found


def rows_of(program: Program) -> int:
    """Return the most rows of an input, looked up once."""
    found = program.prepared.get("rows")
    if found is None:
        rows = [one.shape[0] for one in program.inputs if one.shape]
        found = program.prepared["rows"] = max(rows, default=1)
    return found


class WeightState:
    """The codes of one module's weights; `sums`: checksums to begin with, by name.

    A weight that trains is rounded in every pass, unless lsq.optim.Adam has rounded it in its step.
    Codes lie in memory of their parameter and clip: another parameter gets new memory, since an
    earlier pass may await its backward. Other weights, and all in eval mode, keep codes until their
    Stamp sees a change.
    """

    def __init__(self, sums: Mapping[str, int | None] | None = None):
        self._weights: dict[str, WeightCodes] = {}
        """By the names of the weights. Never changed in place, since other threads may read it."""
        self._sums = dict(sums or {})
        """Checksums of weights at the last call of `changed`."""
        self._repeated: dict[Program, RepeatedPass | None] = {}
        """Passes in eval mode that may run again with these codes; None: it has run once."""
        self.part: nn.Module | None = None
        """This process's part of a layer that is split (lsq.layers.tensor_parallel)."""

    def __reduce__(self):
        return WeightState, (self._sums,)  # a copy of a module makes its own codes

    @property
    def kept(self) -> dict[str, Tensor]:
        """All codes, by the names of the programs' inputs."""
        every = self._weights.values()
        return {name: tensor for codes in every for name, tensor in codes.tensors.items()}

    def clear(self) -> None:
        self._weights, self._repeated, self.part = {}, {}, None

    def forget(self, name: str) -> None:
        self._repeated = {}
        self._weights = {other: one for other, one in self._weights.items() if other != name}

    def repeated(self, module: nn.Module, program: Program) -> "RepeatedPass | None":
        """Return the kept pass of a program if nothing has changed since."""
        found = self._repeated.get(program)
        return found if found is not None and found.holds(module) else None

    def keep(self, program: Program, make: Callable[[], "RepeatedPass | None"]) -> None:
        """Keep the second pass of a program, for the next ones."""
        made = make() if program in self._repeated else None
        others = {} if len(self._repeated) == MOST_REPEATED else self._repeated
        self._repeated = {**others, program: made}

    def changed(self, name: str, values: Tensor) -> bool:
        """Whether a weight has other values than in the last call; on a GPU, always True."""
        before, self._sums[name] = self._sums.get(name), checksum(values)
        return before is None or before != self._sums[name]

    def drop_outdated(self, module: nn.Module, program: Program) -> list[str]:
        """Drop codes of changed weights; return names of those whose clips must be measured."""
        replaced, rows = [], rows_of(program)
        for weight in rounded_weights(program) if self._weights else ():
            codes = self._weights.get(weight.name)
            if codes is None or codes.stamp is None or not codes.stamp.exact:
                continue
            parts, clip = module.sources(weight.name), module.own_parameter(weight.clip)
            if module.changes(parts, clip):
                continue
            changed = codes.stamp.changed([*parts, clip], rows=rows)
            if changed:
                self.forget(weight.name)
                values_alone = len(parts) not in changed and not codes.stamp.same_values(parts)
                trains = any(part.requires_grad for part in parts)
                if values_alone and (clip.requires_grad or not trains):
                    replaced.append(weight.name)
        return replaced

    def codes(
        self,
        module: nn.Module,
        program: Program,
        parameters: Mapping[str, Tensor],
        backend: Backend,
    ) -> dict[str, Tensor]:
        """Return all inputs of `program` that are made from rounded weights, by name."""
        found, lasting = {}, {}
        for weight in rounded_weights(program):
            values, clip = parameters[weight.name], parameters[weight.clip]
            parts = module.sources(weight.name)
            if isinstance(values, CodedWeight):
                found |= values.given(weight.virtual, (*parts, clip))
                continue
            codes = self._now(weight, values, parts, clip, module.changes(parts, clip), backend)
            if isinstance(values, nn.Parameter) or codes.stamp is not None:
                lasting[weight.name] = codes
            for name, *_ in weight.tensors:
                found[name] = codes.tensors[name]
        self._weights = self._weights | lasting  # at once, when all are complete
        return found

    def _now(
        self,
        weight: RoundedWeight,
        values: Tensor,
        parts: Sequence[Tensor],
        clip: Tensor,
        changing: bool,
        backend: Backend,
    ) -> WeightCodes:
        """Round a weight, if that is due; `changing`: training changes it or its clip."""
        codes, owner = self._weights.get(weight.name), (id(values), id(clip))
        alone = isinstance(values, nn.Parameter)  # else several were joined, for this pass
        if changing:
            codes = codes if codes is not None and alone and codes.owner == owner else None
            if codes is not None and codes.current(weight.names, values, clip):
                return codes
        elif codes is not None and (codes.stamp is None or not codes.stamp.exact):
            codes = None  # made in training: a backward pass may await them
        elif codes is not None and codes.fresh >= weight.names:
            return codes  # `drop_outdated` has checked them
        codes = codes or WeightCodes(owner)
        stamped, codes.stamp = None if changing else codes.stamp, None
        writer = codes.writers.get((backend, weight.virtual.values.dtype, weight.names))
        if writer is None or not codes.holds(weight.tensors):
            _write_first(codes, weight, values, clip, backend, prepare=alone)
        else:
            writer(values, clip)
        if changing and alone and weight.by_optimizers:
            codes.clip = ref(clip)
            state_of(values).codes = codes
        if not changing and all(isinstance(part, nn.Parameter) for part in parts):
            codes.fresh |= weight.names
            codes.stamp = stamped or Stamp([*parts, clip])
        return codes


@torch.inference_mode(False)  # kept codes may be needed with gradients enabled
@torch.no_grad()
def _write_first(
    codes: WeightCodes,
    weight: RoundedWeight,
    values: Tensor,
    clip: Tensor,
    backend: Backend,
    *,
    prepare: bool,
) -> None:
    """Write a weight's codes, into new memory where it is missing; `prepare`: keep a writer."""
    if not codes.holds(weight.tensors):
        for name, shape, dtype in weight.tensors:
            tensor = codes.tensors.get(name)
            if tensor is None or tensor.shape != shape:
                codes.tensors[name] = backend.allocate(shape, dtype)
        codes.rounded = None
        codes.writers.clear()
    read = {weight.name: values, weight.clip: clip}
    real = weight.virtual.bind(
        lambda one: (
            read[one.name].detach().to(one.dtype).contiguous()
            if one.name in read
            else codes.tensors[one.name]
        )
    )
    if weight.by_optimizers and codes.rounded is None:
        codes.rounded, codes.rounded_names = real.bare(), weight.names
    if prepare and real.codes is not None and backend.refillable:
        key = backend, weight.virtual.values.dtype, weight.names
        codes.writers[key] = _writer(real, backend)
        codes.writers[key](values, clip)
    else:
        write(real, backend)


def write(weight: Weight, backend: Backend) -> None:
    """Write codes, decoded values or packed groups of a weight."""
    if weight.codes is not None:
        if weight.averaged:
            _average(weight, weight.values, weight.clip)
        backend.run(_rounding(weight))
    if weight.grouped is not None:
        pack_weight(weight, backend.run)
    elif weight.decoded is not None:
        backend.run(decode_weight(weight))


def _rounding(weight: Weight) -> RoundWeight:
    return RoundWeight(weight=weight, new_clip=weight.new_clip)


def _average(weight: Weight, values: Tensor, clip: Tensor) -> None:
    """Write the clips of a weight that are mean magnitudes."""
    rows = values.t() if weight.in_out else values
    clip.data.copy_(weight.format.measured_clips(rows, clip))


def _writer(weight: Weight, backend: Backend) -> Callable[[Tensor, Tensor], None]:
    dtypes, operation = (weight.values.dtype, weight.clip.dtype), _rounding(weight)
    scratch = [backend.allocate(*spec) for spec in backend.scratch(operation)]
    leaves = {leaf.name: leaf for leaf in operation.leaves()}
    of_values = Slot(operation, leaves["weight.values"])
    slots = [of_values, Slot(operation, leaves["weight.clip"])]
    slots += [Slot(operation, leaves["new_clip"])] if operation.new_clip is not None else []
    run, averaged = backend.prepare([(operation, scratch)]), weight.averaged

    def writer(values: Tensor, clip: Tensor) -> None:
        values = values.detach().to(dtypes[0]).contiguous()
        clip = clip.detach().to(dtypes[1]).contiguous()
        backend.check(values, "a weight")
        if averaged:
            _average(weight, values, clip)
        for slot in slots:  # inlined, since every training pass runs it
            tensor = values if slot is of_values else clip
            slot.fields[slot.name] = tensor
            slot.struct[slot.word] = tensor.data_ptr() or NOWHERE
        run()
        for slot in slots:
            slot.fields[slot.name] = None

    return writer


@torch.inference_mode(False)
@torch.no_grad()
def encoded(
    values: Tensor,
    clip: Tensor,
    form: WeightFormat,
    backend: Backend,
    *,
    rows: int,
    in_out: bool,
    absmax: bool,
) -> Codes:
    """Round a weight [N, K] to new codes as programs read them; `rows`: P, at least N."""
    count, columns = values.shape[::-1] if in_out else values.shape
    stored = backend.allocate((rows, form.stored_columns(columns)), form.storage)
    scale = backend.allocate((rows,), torch.float32)
    weight = Weight(
        format=form,
        values=values.detach().float().contiguous(),
        clip=clip.detach(),
        codes=stored,
        scale=scale,
        in_out=in_out,
        absmax=absmax,
    )
    write(weight, backend)
    sizes = {"rows": count, "columns": columns}
    return Codes(format=form, stored=stored, scale=scale, **sizes, in_out=in_out)


def rounded_values(
    rows: Tensor, clip: Tensor, form: WeightFormat | ScaledFormat, backend: Backend
) -> Tensor:
    """Return the values float32 [N, K] of a weight [N, K] rounded under clips [N] or [1]."""
    if isinstance(form, WeightFormat):
        stored, scale = form.encode(rows, clip)
        return form.unpack(stored, rows.shape[1]) * scale[:, None]
    weight = Weight(format=form, values=rows, clip=clip, decoded=torch.empty_like(rows))
    backend.run(decode_weight(weight))
    return weight.decoded
