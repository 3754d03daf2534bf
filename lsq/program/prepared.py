"""A pass that is bound to planned memory and prepared once, and then run as a whole, again and again.

Everything inside has its fixed place. What crosses the pass's borders (inputs, parameters, results, gradients) may lie
elsewhere each time: its addresses are put in before a run, and nothing of it is held afterwards.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch

from lsq.program.backend import Backend
from lsq.program.declare import NOWHERE, Declared, Leaf, address_words
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor


class Slot:
    """The place of one tensor in a bound operation and in its struct, for tensors of the same shape and dtype.

    Args:
        operation: has a contiguous tensor there.
        leaf: which one.
    """

    def __init__(self, operation: Operation, leaf: Leaf):
        holder: Declared = operation
        for part in leaf.path[:-1]:
            holder = getattr(holder, part)
        self._fields, self._name = vars(holder), leaf.path[-1]
        self._struct, self._word = operation.packed, address_words(type(operation))[leaf.path]

    def put(self, tensor: torch.Tensor) -> None:
        """From now on the operation works on `tensor`."""
        self._fields[self._name] = tensor
        self._struct[self._word] = tensor.data_ptr() or NOWHERE

    def clear(self) -> None:
        """Let go of the tensor."""
        self._fields[self._name] = None


class PreparedPass:
    """The operations `indices` of a program on fixed memory.

    Args:
        program: on a backend whose prepared work sees what is put into its operations later (Backend.refillable).
        indices: of the pass.
        inside: the tensors that do not cross its borders; they stay where they are.
        borders: the others, of this run.
        scratch: of each operation.
    """

    def __init__(
        self, program: Program, indices: range, backend: Backend, *, inside: Mapping[VirtualTensor, torch.Tensor],
        borders: Mapping[VirtualTensor, torch.Tensor], scratch: Iterable[list[torch.Tensor]],
    ):  # fmt: skip
        tensors = {**inside, **borders}
        bound = [program.operations[index].bind(tensors.__getitem__) for index in indices]
        self._slots: dict[VirtualTensor, list[Slot]] = defaultdict(list)
        for index, operation in zip(indices, bound, strict=True):
            for leaf in operation.leaves():
                virtual = leaf.of(program.operations[index])
                if virtual in borders and virtual not in inside:
                    self._slots[virtual].append(Slot(operation, leaf))
        self._backend = backend
        self._run = backend.prepare(list(zip(bound, scratch, strict=True)))
        self._clear()

    def run(self, borders: Mapping[VirtualTensor, torch.Tensor]) -> None:
        """Run it on other tensors at its borders, of the same shapes and dtypes.

        Raises:
            ValueError: the backend cannot take one of them.
        """
        try:
            for virtual, slots in self._slots.items():
                tensor = borders[virtual]
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
