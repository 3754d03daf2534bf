"""Steps of many parameters on one device: prepared once, repeated as long as their memory stays."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lsq.native.addresses import contiguous_address
from lsq.ops.adam import NORM_RUN, NUMBERS, Adam, AdamSteps, GradientNorm, Table, tiles_of
from lsq.program.values import Weight
from lsq.run.backends import Backend
from lsq.run.cuda import CUDA
from lsq.run.frames import Slot
from lsq.run.parameter_state import WeightCodes, state_of
from lsq.run.shards import is_shard, local

ROW = 8
"""Floats from one row of numbers to the next; more than NUMBERS, so that rows are aligned."""


@dataclass(frozen=True, eq=False)
class Members:
    """Parameters that step, each with its gradient, both moments and its row of numbers. For a
    shard, the moments are of this process's part."""

    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    firsts: list[Tensor] = field(default_factory=list)
    seconds: list[Tensor] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def add(
        self, parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, row: int
    ) -> None:
        self.parameters.append(parameter)
        self.gradients.append(gradient)
        self.firsts.append(local(first))
        self.seconds.append(local(second))
        self.rows.append(row)

    def memory(self) -> tuple[list, ...]:
        """Return what a prepared step depends on, except gradients."""
        states = list(map(state_of, self.parameters))
        codes = [state.codes for state in states]
        clips = [one and one.clip and one.clip() for one in codes]
        parts = list(map(local, self.parameters))
        tensors = parts, self.firsts, self.seconds
        return (
            list(map(id, self.parameters)),
            list(map(Tensor.size, parts)),
            self.rows,
            *(list(map(Tensor.data_ptr, several)) for several in tensors),
            [state.limit for state in states],
            [one and one.rounded for one in codes],
            [clip is not None and clip.data_ptr() for clip in clips],
        )


class Updates:
    """Steps of `members` on a backend, all at once. Their gradients may lie elsewhere each time.
    `rows`: number of rows of numbers."""

    def __init__(self, backend: Backend, members: Members, rows: int):
        self._backend = backend
        self._fits = members.memory(), rows
        self._given = backend.allocate([rows + 1, ROW], torch.float32)
        self._factor = self._given[rows, :1]
        self._norm = backend.allocate([1], torch.float32)
        states = [state_of(parameter).codes for parameter in members.parameters]
        codes = [
            state and state.for_optimizer(parameter)
            for state, parameter in zip(states, members.parameters, strict=True)
        ]
        self._order = sorted(range(len(codes)), key=lambda number: codes[number] is not None)
        self._steps = tuple(self._step(members, number, codes[number]) for number in self._order)
        gradient = next(leaf for leaf in Adam.leaves() if leaf.name == "gradient")
        self._slots = [Slot(step, gradient) for step in self._steps]
        # (gradient that was put, address that the step reads, perhaps of a converted copy)
        self._gradients: list[tuple[Tensor, int]] = []
        self.parameters = members.parameters
        self._rounded: list[tuple[WeightCodes, Tensor]] = [
            (states[number], members.parameters[number])
            for number in self._order
            if codes[number] is not None
        ]
        self._counted = [one for one in members.parameters if not is_shard(one)]
        tables = dict.fromkeys(("plain", "coded", "shared", "all"))
        if isinstance(backend, CUDA):
            tables = self._tables()
        norms = GradientNorm(steps=self._steps, table=tables.pop("all"), norm=self._norm)
        self._update = self._prepare(AdamSteps(steps=self._steps, **tables))
        self._measure = self._prepare(norms)

    def _step(self, members: Members, number: int, codes: Weight | None) -> Adam:
        parameter, first, second = (
            each[number] for each in (members.parameters, members.firsts, members.seconds)
        )
        check_moments(parameter, first, second)
        weight = local(parameter).detach()
        return Adam(
            weight=weight,
            gradient=plain_gradient(members.gradients[number], parameter),
            first=first,
            second=second,
            numbers=self._given[members.rows[number], :NUMBERS],
            gradient_factor=self._factor,
            limit=state_of(parameter).limit,
            new_weight=weight,
            new_first=first,
            new_second=second,
            rounded=codes,
            new_clip=codes and codes.new_clip,
        )

    def _prepare(self, operation):
        scratch = [self._backend.allocate(*spec) for spec in self._backend.scratch(operation)]
        return self._backend.prepare([(operation, scratch)])

    def _tables(self) -> dict[str, Table]:
        """On a GPU: copy all structs there, and tell each block its part of which struct."""
        place = self._backend.device
        self._packed = b""
        for step in self._steps:
            for tensor in (step.weight, step.first, step.second):
                contiguous_address(tensor, place, "a step of Adam")
        self._structs = self._backend.allocate([len(self._bytes())], torch.uint8)
        steps = dict(enumerate(self._steps))
        coded = {number: step.blocks for number, step in steps.items() if step.rounded is not None}
        tables = {
            "plain": {n: step.blocks for n, step in steps.items() if step.rounded is None},
            "coded": coded,
            "shared": {number: 1 for number in coded if steps[number].clips == 1},
            "all": {number: -(-step.numel // NORM_RUN) for number, step in steps.items()},
        }
        return {
            name: Table(structs=self._structs, tiles=tiles_of(counts).to(place))
            for name, counts in tables.items()
        }

    def _bytes(self) -> bytes:
        return b"".join(bytes(step.packed) for step in self._steps)

    def fits(self, members: Members, rows: int) -> bool:
        return self._fits == (members.memory(), rows)

    def put(self, members: Members) -> None:
        now = members.gradients
        same = (
            known is one and address == one.data_ptr()
            for (known, address), one in zip(self._gradients, now, strict=False)
        )
        if len(self._gradients) == len(now) and all(same):
            return
        plain = list(map(plain_gradient, now, members.parameters))
        for slot, number in zip(self._slots, self._order, strict=True):
            slot.put(plain[number])
        self._gradients = list(zip(now, map(Tensor.data_ptr, plain), strict=True))
        if isinstance(self._backend, CUDA) and (found := self._bytes()) != self._packed:
            self._packed = found
            self._upload(torch.frombuffer(bytearray(found), dtype=torch.uint8), self._structs)

    def norm(self) -> Tensor:
        """Return the norm [1] of the gradients without any factor; the next call overwrites it."""
        self._measure()
        return self._norm

    def run(self, numbers: Tensor, factor: float | Tensor) -> None:
        """Step with numbers [rows, NUMBERS] and gradients times `factor`; release the gradients."""
        host = torch.zeros(len(self._given), ROW, dtype=torch.float32, device="cpu")
        host[:-1, :NUMBERS] = numbers
        host[-1, 0] = 1.0 if isinstance(factor, Tensor) else factor
        self._upload(host, self._given)
        if isinstance(factor, Tensor):
            self._factor.mul_(factor.to(self._factor.device, non_blocking=True))
        self._update()
        for slot in self._slots:
            slot.clear()
        self._gradients = []
        torch.autograd.graph.increment_version(self._counted)
        for codes, parameter in self._rounded:
            codes.written(parameter)

    def _upload(self, host: Tensor, there: Tensor) -> None:
        """Copy without waiting: PyTorch keeps pinned memory until the copy is done."""
        there.copy_(host if there.device.type == "cpu" else host.pin_memory(), non_blocking=True)


def check_moments(parameter: Tensor, first: Tensor, second: Tensor) -> None:
    """Raise ValueError unless both moments have the shape and device of their parameter."""
    for name, moment in {"exp_avg": first, "exp_avg_sq": second}.items():
        remedy = "load a state of the same parameters in the same order, after they have moved"
        _check_like(local(moment), local(parameter), f"the state {name}", remedy)


def plain_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter, or of this process's shard, as contiguous float32. Raises
    ValueError: it is sparse, or no longer fits its parameter."""
    if gradient.layout is not torch.strided:
        raise ValueError(
            "a gradient is sparse, which lsq's Adam does not take; take torch.optim.SparseAdam"
        )
    gradient = local(gradient)
    _check_like(
        gradient,
        local(parameter),
        "the gradient",
        "make gradients anew after a parameter has changed",
    )
    # nearly all are plain, and asking is faster than converting
    plain = gradient.dtype is torch.float32 and gradient.is_contiguous()
    return gradient if plain else gradient.to(torch.float32).contiguous()


def _check_like(tensor: Tensor, parameter: Tensor, what: str, remedy: str) -> None:
    if tensor.shape != parameter.shape or tensor.device != parameter.device:
        raise ValueError(
            f"{what} of a parameter {tuple(parameter.shape)} on {parameter.device} is"
            f" {tuple(tensor.shape)} on {tensor.device}; {remedy}"
        )
