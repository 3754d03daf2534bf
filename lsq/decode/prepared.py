"""Programs of decoding bound to memory: weights packed once, temporary tensors that share memory, fixed addresses."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lsq.backends import Backend
from lsq.decode.model import DecodingModel
from lsq.layers.embedding import sinusoidal_table
from lsq.ops.nonlinearity import Activation
from lsq.ops.packed_project import PackedProject
from lsq.ops.packed_weight import PackedWeight
from lsq.ops.project import Project
from lsq.ops.rounding import UnpackWeight
from lsq.program.backend import Call
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor

T = TypeVar("T")


class Recent(Generic[T]):
    """What was made for the keys that were used last, at most `most` of them."""

    def __init__(self, most: int):
        self._most = most
        self._kept: OrderedDict[Hashable, T] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is kept for `key`, or made now."""
        if key not in self._kept:
            self._kept[key] = make()
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def clear(self) -> None:
        """Nothing is right any more."""
        self._kept.clear()


class Preparation:
    """Binds programs to the tensors of one model.

    Args:
        model: which.
        place: where they will run.
    """

    def __init__(self, model: DecodingModel, place: Backend):
        self._model, self._place = model, place
        self._packed: dict[str, PackedWeight] = {}
        self._tables = dict(model.tensors)
        architecture = model.architecture
        for side, stack in architecture.stacks.items():
            if stack.positions == "sinusoidal":
                rows = stack.max_positions + architecture.padding + 1
                table = sinusoidal_table(rows, stack.config.hidden, architecture.padding)
                self._tables[f"{side}.embed_tokens.position_weight"] = table

    def weight(self, name: str, inner: int) -> PackedWeight:
        """The weight of that name with `inner` inputs, packed."""
        if name not in self._packed:
            codes = self._model.codes(name, inner).contiguous()
            self._packed[name] = PackedWeight.of(codes, self._model.tensors[name + ".scale"])
        return self._packed[name]

    def calls(
        self, program: Program, inputs: Mapping[str, Tensor], results: Mapping[VirtualTensor, Tensor] | None = None
    ) -> tuple[list[Call], dict[VirtualTensor, Tensor]]:
        """The operations of a program on real tensors, for a backend to prepare, and its tensors.

        Args:
            program: without a backward pass.
            inputs: by name, those that are no tensors of the model.
            results: where outputs go; fresh memory for the others.
        """
        given = {**self._tables, **inputs}
        found: dict[VirtualTensor, Tensor] = dict(results or {})
        for border in (*program.inputs, *program.parameters):
            if border.name in given:
                found[border] = given[border.name]
        free: defaultdict[int, list[Tensor]] = defaultdict(list)
        calls = []
        for index, operation in enumerate(program.operations):
            if not isinstance(operation, UnpackWeight):  # packed weights are unpacked already
                for tensor in program.outputs_of[index]:
                    if tensor not in found:
                        found[tensor] = _taken(free, tensor)
                bound = self._packing(operation).bind(lambda one: one if isinstance(one, Tensor) else found[one])
                calls.append((bound, [self._place.allocate(*spec) for spec in self._place.scratch(bound)]))
                for tensor in program.dying[index]:
                    if tensor.role == "temporary" and tensor in found:
                        free[tensor.size].append(found[tensor])
        return calls, found

    def _packing(self, operation: Operation) -> Operation:
        """The same with a packed weight."""
        if not isinstance(operation, Project):
            return operation
        end = operation.nonlinearity
        return PackedProject(
            x=operation.x.coded.bare(), bias=operation.bias, out=operation.out, rounded=operation.rounded,
            weight=self.weight(operation.weight.values.name, operation.x.tensor.shape[1]),
            activation=Activation.none if end is None else end.activation,
        )


def _taken(free: Mapping[int, list[Tensor]], tensor: VirtualTensor) -> Tensor:
    """Memory of a tensor that nobody reads any more, or fresh memory."""
    memory = free[tensor.size].pop() if free[tensor.size] else torch.empty(tensor.size, dtype=torch.uint8)
    return memory.view(-1).view(torch.uint8).view(tensor.dtype).view(tensor.shape)
