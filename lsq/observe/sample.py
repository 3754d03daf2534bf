"""A few rows of one pass of a module, computed twice: as the module does, and in floats.

M rows of the batch, m of the sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lsq.layers.blocks import PackedSequences
from lsq.layers.float_fallback import in_floats
from lsq.layers.programs import origins
from lsq.observe.reading import Reading, decibels
from lsq.program.backend import Backend
from lsq.program.parameters import CLIPS
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor
from lsq.run.executor import Execution

STARTS = {"sentences": "cu_seqlens", "source": "memory_cu_seqlens"}
"""What programs are made of, sizes of sentences -> inputs that say where these begin."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a program of m rows needs: a copy of what will be gone when its gradients are known."""

    program: Program
    backend: Backend
    tensors: Mapping[str, Tensor]
    """Inputs and parameters by name."""
    rows: Tensor | None
    """int64 [m], which of the batch; None: the first ones."""

    @classmethod
    def of(
        cls, program: Program, tensors: Mapping[str, Tensor], rows: int, backend: Backend
    ) -> "Sample":
        """About `rows` rows of a pass of `program` on `tensors`.

        Where rows are by themselves they come from all over the batch; of sentences the first ones
        are taken, one at least. A program with neither in its arguments keeps the batch.
        """
        smaller, index = _smaller(program, tensors, rows)
        weights = {tensor.name for weight in program.weights.values() for tensor in weight.written}
        kept = {}
        for virtual in smaller.inputs:
            given = tensors[virtual.name].detach()
            kept[virtual.name] = (
                given if virtual.name in weights else _part(given, virtual, index).clone()
            )
        for virtual in smaller.parameters:
            given = tensors[virtual.name]
            kept[virtual.name] = given.detach().clone() if virtual.declared.kind in CLIPS else given
        return cls(program=smaller, backend=backend, tensors=kept, rows=index)

    def reading(self, gradients: Sequence[Tensor | None] | None) -> Reading:
        """Signal-to-noise of results, and of the gradients that `gradients` of the results, [M,
        ...] each, lead to.

        Those of a weight have a slice for each input of its product. `gradients`: None where
        nothing goes back; None in
        it: zero.
        """
        found, expected = (
            self._run(self.program, gradients),
            self._run(in_floats(self.program), gradients),
        )

        def pairs(slices: Mapping[int | str, int]) -> list[tuple[Tensor, Tensor, int]]:
            """Of tensors by name, each with the dimension along which its slices go; padded logits
            are more."""
            return [
                (expected[name], found[name][..., : expected[name].shape[-1]], dim)
                for name, dim in slices.items()
                if expected.get(name) is not None
            ]

        def worst(names) -> float | None:
            ratios = [decibels(pair) for pair in pairs(dict.fromkeys(names, 1))]
            return min((ratio for ratio in ratios if ratio is not None), default=None)

        weights = {name: int(weight.in_out) for name, weight in self.program.weights.items()}
        return Reading(
            output=worst(range(len(self.program.outputs))),
            input_gradient=worst(virtual.name for virtual in self.program.inputs),
            weight_gradient=decibels(*pairs(weights)),
        )

    def _run(
        self, program: Program, gradients: Sequence[Tensor | None] | None
    ) -> dict[int | str, Tensor]:
        """Outputs by number, gradients by the name of what they are of."""
        leaves = {
            virtual.name: self.tensors[virtual.name].detach().float().requires_grad_()
            for virtual in program.differentiable
        }
        goes_back = gradients is not None and bool(leaves)
        with torch.set_grad_enabled(goes_back):
            outputs = Execution(program, self.backend)({**self.tensors, **leaves})
        found = dict(enumerate(one.detach() for one in outputs))
        if goes_back:
            given = [
                torch.zeros_like(output) if one is None else _part(one, virtual, self.rows)
                for one, output, virtual in zip(gradients, outputs, program.outputs, strict=True)
            ]
            made = torch.autograd.grad(outputs, list(leaves.values()), given, allow_unused=True)
            found |= dict(zip(leaves, made, strict=True))
        return found


def _smaller(
    program: Program, tensors: Mapping[str, Tensor], rows: int
) -> tuple[Program, Tensor | None]:
    """The program of a sample, and which rows it takes, None: the first ones."""
    origin = origins[program]
    arguments = dict(origin.arguments)
    every = arguments.get("rows")
    if every is not None:
        arguments["rows"] = min(rows, every)
        index = (
            torch.arange(arguments["rows"], device=tensors["x"].device)
            * every
            // max(arguments["rows"], 1)
        )
        return origin.build(**arguments), index
    if "sentences" not in arguments:
        return program, None
    ends = {
        name: tensors[cu_seqlens][1:].tolist()
        for name, cu_seqlens in STARTS.items()
        if name in arguments
    }
    count = min(sum(end < rows for end in ends["sentences"]) + 1, len(ends["sentences"]))
    arguments |= {
        name: PackedSequences(rows=found[count - 1], count=count) for name, found in ends.items()
    }
    return origin.build(**arguments), None


def _part(tensor: Tensor, virtual: VirtualTensor, index: Tensor | None) -> Tensor:
    """What the smaller program takes of a tensor of the batch."""
    if tensor.shape[:1] != virtual.shape[:1]:
        tensor = tensor[: virtual.shape[0]] if index is None else tensor[index]
    return tensor[:, : virtual.shape[1]] if len(virtual.shape) == 2 else tensor
