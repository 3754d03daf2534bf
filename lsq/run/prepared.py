"""A pass that is bound to memory and prepared once, and then run as a whole, again and again.

Everything inside has its tensors for good. What crosses the pass's borders (inputs, parameters,
results, gradients) may
lie elsewhere each time: its addresses are put in before a run, and nothing of it is held
    afterwards.
"""

from collections import defaultdict
from collections.abc import Mapping

import torch

from lsq.program.backend import Backend
from lsq.program.declare import NOWHERE, Leaf, address_words
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor


class Slot:
    """The place of one tensor in a bound operation and in its struct, for tensors of the same shape
    and dtype.

    Args:
        operation: has a contiguous tensor there.
        leaf: which one.
    """

    def __init__(self, operation: Operation, leaf: Leaf):
        self._fields, self._name = vars(leaf.owner(operation)), leaf.path[-1]
        self._struct, self._word = operation.packed, address_words(type(operation))[leaf.path]

    def put(self, tensor: torch.Tensor) -> None:
        """From now on the operation works on `tensor`."""
        self._fields[self._name] = tensor
        self._struct[self._word] = tensor.data_ptr() or NOWHERE

    def clear(self) -> None:
        """Let go of the tensor."""
        self._fields[self._name] = None

    def follow(self) -> None:
        """The tensor is the same, but its memory may lie elsewhere by now."""
        self._struct[self._word] = self._fields[self._name].data_ptr() or NOWHERE


class PreparedPass:
    """The operations `indices` of a program on memory of theirs.

    Args:
        program: on a backend whose prepared work sees what is put into its operations later
            (Backend.refillable).
        indices: of the pass.
        inside: the tensors that do not cross its borders, scratch memory among them.
        borders: the others, of this run.
    """

    def __init__(
        self,
        program: Program,
        indices: range,
        backend: Backend,
        *,
        inside: Mapping[VirtualTensor, torch.Tensor],
        borders: Mapping[VirtualTensor, torch.Tensor],
    ):
        tensors = {**borders, **inside}
        bound = [program.operations[index].bind(tensors.__getitem__) for index in indices]
        self._slots: dict[VirtualTensor, list[Slot]] = defaultdict(list)
        self._inside: list[Slot] = []
        for index, operation in zip(indices, bound, strict=True):
            for leaf in operation.leaves():
                virtual = leaf.of(program.operations[index])
                if virtual is not None:
                    (self._inside if virtual in inside else self._slots[virtual]).append(
                        Slot(operation, leaf)
                    )
        self._backend = backend
        scratch = ([inside[tensor] for tensor in program.scratch[index]] for index in indices)
        self._run = backend.prepare(list(zip(bound, scratch, strict=True)))
        self._clear()

    def follow(self) -> None:
        """The memory inside lies elsewhere by now."""
        for slot in self._inside:
            slot.follow()

    def run(self, borders: Mapping[VirtualTensor, torch.Tensor]) -> None:
        """Run it on other tensors at its borders, of the same shapes.

        Raises:
            ValueError: one of them has another dtype or is not contiguous, or the backend cannot
                take it.
        """
        try:
            for virtual, slots in self._slots.items():
                tensor = borders[virtual]
                if tensor.dtype != virtual.dtype or not tensor.is_contiguous():
                    found = f"{tensor.dtype} with strides {tensor.stride()}"
                    raise ValueError(
                        f"{virtual.name} is {found}; it must be a contiguous tensor of"
                        f" {virtual.dtype}"
                    )
                self._backend.check(tensor, virtual.name)
                for slot in slots:
                    slot.put(tensor)
            self._run()
        finally:
            self._clear()

    def _clear(self) -> None:
        for slots in self._slots.values():
            for slot in slots:
                slot.clear()
