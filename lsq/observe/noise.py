"""Noise of one pass of a module: m of M rows are computed twice, as the module does, in floats."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from lsq.layers.blocks import PackedSequences
from lsq.layers.builder import call_of, in_floats
from lsq.program.backend import Backend
from lsq.program.program import Program
from lsq.program.tensor import CLIPS, VirtualTensor
from lsq.run.executor import Execution

LEAST, MOST = -60.0, 120.0
"""The range of decibels: LEAST for noise alone, MOST for no noise."""
CU_SEQLENS = {"sentences": "cu_seqlens", "source": "memory_cu_seqlens"}
"""Argument of a program with sizes of packed sentences -> its input with their first rows."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Signal-to-noise of a module in one pass, in dB.

    Of outputs and of inputs' gradients it is the least, of weights' gradients that of all together.
    """

    output: float | None = None
    input_gradient: float | None = None
    weight_gradient: float | None = None

    def values(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def worst(self, other: "Reading") -> "Reading":
        mine, others = self.values(), other.values()
        both = {name: min(mine[name], others[name]) for name in mine.keys() & others}
        return Reading(**{**mine, **others, **both})


QUANTITIES = tuple(field.name for field in fields(Reading))


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The least signal-to-noise in dB with which a module trains well (docs/numbers.md)."""

    output: float = 12.0
    input_gradient: float = 8.0
    weight_gradient: float = 4.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int | float) or math.isnan(value):
                raise ValueError(
                    f"{name} is {value!r}; it must be a number of decibels, -inf for no bound"
                )

    def broken(self, reading: Reading) -> list[str]:
        return [
            f"{name.replace('_', ' ')} {value:.1f} dB, below {getattr(self, name):.1f}"
            for name, value in reading.values().items()
            if value < getattr(self, name)
        ]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A program of m rows, and its tensors: copied if they may change before gradients come."""

    program: Program
    backend: Backend
    tensors: Mapping[str, Tensor]
    rows: Tensor | None
    """int64 [m]: the rows' indices in the batch; None: the first rows."""

    @classmethod
    def of(
        cls, program: Program, tensors: Mapping[str, Tensor], rows: int, backend: Backend
    ) -> "Sample":
        """Sample about `rows` rows of a pass: evenly spaced, or the first sentences."""
        smaller, index = _smaller(program, tensors, rows)
        weights = {tensor.name for weight in program.weights.values() for tensor in weight.written}
        kept = {}
        for virtual in smaller.inputs:
            tensor = tensors[virtual.name].detach()
            if virtual.name not in weights:
                tensor = _part(tensor, virtual, index).clone()
            kept[virtual.name] = tensor
        for virtual in smaller.parameters:
            tensor = tensors[virtual.name]
            copied = virtual.declared.kind in CLIPS
            kept[virtual.name] = tensor.detach().clone() if copied else tensor
        return cls(program=smaller, backend=backend, tensors=kept, rows=index)

    def reading(self, gradients: Sequence[Tensor | None] | None) -> Reading:
        """Measure the noise of outputs and, given their `gradients` [M, ...], of gradients."""
        rounded = self._run(self.program, gradients)
        exact = self._run(in_floats(self.program), gradients)

        def pair(name: int | str, dim: int) -> tuple[Tensor, Tensor, int]:
            # the program pads logits
            return exact[name], rounded[name][..., : exact[name].shape[-1]], dim

        def worst(names: Iterable[int | str]) -> float | None:
            known = [name for name in names if exact.get(name) is not None]
            ratios = [decibels(pair(name, 1)) for name in known]
            return min((ratio for ratio in ratios if ratio is not None), default=None)

        # a slice for each input of the product
        weights = {name: int(weight.in_out) for name, weight in self.program.weights.items()}
        return Reading(
            output=worst(range(len(self.program.outputs))),
            input_gradient=worst(virtual.name for virtual in self.program.inputs),
            weight_gradient=decibels(
                *(pair(name, dim) for name, dim in weights.items() if exact.get(name) is not None)
            ),
        )

    def _run(
        self, program: Program, gradients: Sequence[Tensor | None] | None
    ) -> dict[int | str, Tensor]:
        """Return outputs by number, and gradients by the name of the input or parameter."""
        given = {
            virtual.name: _fit(self.tensors[virtual.name], virtual)
            for virtual in (*program.inputs, *program.parameters)
        }
        leaves = {
            virtual.name: given[virtual.name].detach().float().requires_grad_()
            for virtual in program.differentiable
        }
        goes_back = gradients is not None and bool(leaves)
        with torch.set_grad_enabled(goes_back):
            outputs = Execution(program, self.backend)({**given, **leaves})
        results = dict(enumerate(output.detach() for output in outputs))
        if goes_back:
            of_outputs = [
                torch.zeros_like(output)
                if gradient is None
                else _part(gradient, virtual, self.rows)
                for gradient, output, virtual in zip(
                    gradients, outputs, program.outputs, strict=True
                )
            ]
            of_leaves = torch.autograd.grad(
                outputs, list(leaves.values()), of_outputs, allow_unused=True
            )
            results |= dict(zip(leaves, of_leaves, strict=True))
        return results


def _smaller(
    program: Program, tensors: Mapping[str, Tensor], rows: int
) -> tuple[Program, Tensor | None]:
    """Return the program of a sample, and the indices of its rows; None: the first rows."""
    build, arguments = call_of(program)
    arguments = dict(arguments)
    every = arguments.get("rows")
    if every is not None:
        arguments["rows"] = count = min(rows, every)
        index = torch.arange(count, device=tensors["x"].device) * every // max(count, 1)
        return build(**arguments), index
    if "sentences" not in arguments:
        return program, None
    ends = {
        name: tensors[cu_seqlens][1:].tolist()
        for name, cu_seqlens in CU_SEQLENS.items()
        if name in arguments
    }
    count = min(sum(end < rows for end in ends["sentences"]) + 1, len(ends["sentences"]))
    arguments |= {
        name: PackedSequences(rows=rows[count - 1], count=count) for name, rows in ends.items()
    }
    return build(**arguments), None


def _fit(tensor: Tensor, virtual: VirtualTensor) -> Tensor:
    """Leave out zeros that pad a tensor for products of codes."""
    if tensor.shape == virtual.shape:
        return tensor
    return tensor[tuple(slice(size) for size in virtual.shape)]


def _part(tensor: Tensor, virtual: VirtualTensor, index: Tensor | None) -> Tensor:
    if tensor.shape[:1] != virtual.shape[:1]:
        tensor = tensor[: virtual.shape[0]] if index is None else tensor[index]
    return tensor[:, : virtual.shape[1]] if len(virtual.shape) == 2 else tensor


def decibels(*pairs: tuple[Tensor, Tensor, int]) -> float | None:
    """Return signal-to-noise of tensors together, 10 log10(signal / noise); None without signal.

    noise / signal is the larger of two ratios. A few large values decide the first, all noise over
    all signal. Many small slices decide the second, the mean ratio of slices. Slices without a
    finite signal do not count.

    Args:
        pairs: (exact [M, N], rounded [M, N], dimension along which slices lie: 1 for rows, 0 for
            columns).
    """
    parts = [_slices(*pair) for pair in pairs]
    if not sum(len(signal) for signal, _ in parts):
        return None
    signal, noise = map(torch.cat, zip(*parts, strict=True))
    share = max((noise.sum() / signal.sum()).item(), (noise / signal).mean().item())
    if share == 0:
        return MOST
    return min(max(-10 * math.log10(share), LEAST), MOST) if 0 < share < math.inf else LEAST


def _slices(exact: Tensor, rounded: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    exact, rounded = exact.float(), rounded.float()
    if exact.dim() < 2:
        exact, rounded, dim = exact.reshape(1, -1), rounded.reshape(1, -1), 1
    signal = exact.square().sum(dim)
    counts = (signal > 0) & signal.isfinite()
    return signal[counts], (rounded - exact).square().sum(dim)[counts].nan_to_num(nan=math.inf)
