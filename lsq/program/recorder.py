"""What stands in a program while it is written down: tensors by unique names, operations, and who
wrote what."""

from collections.abc import Collection

import torch

from lsq.program.operation import Operation
from lsq.program.parameters import Kind, Parameter
from lsq.program.tensor import VirtualTensor


class Recorder:
    """Collects operations over virtual tensors.

    Args:
        wanted: inputs and parameters of these names alone need a gradient; None: all do.
    """

    def __init__(self, wanted: Collection[str] | None = None):
        self._wanted = wanted
        self._needless: set[VirtualTensor] = set()
        """What depends on nothing that needs a gradient."""
        self._operations: list[Operation] = []
        self._inputs: list[VirtualTensor] = []
        self._parameters: dict[str, VirtualTensor] = {}
        self._outputs: list[VirtualTensor] = []
        self._producers: dict[VirtualTensor, Operation] = {}
        self._names: set[str] = set()

    def tensor(
        self, name: str, shape, dtype=torch.float32, role: str = "temporary"
    ) -> VirtualTensor:
        """A new virtual tensor; a number is appended to a name that is taken."""
        unique, number = name, 2
        while unique in self._names:
            unique, number = f"{name}.{number}", number + 1
        self._names.add(unique)
        return VirtualTensor(name=unique, shape=tuple(shape), dtype=dtype, role=role)

    def like(self, name: str, tensor: VirtualTensor) -> VirtualTensor:
        """A new tensor with the shape and dtype of another."""
        return self.tensor(name, tensor.shape, tensor.dtype)

    def input(self, name: str, shape, dtype=torch.float32) -> VirtualTensor:
        """A tensor that each run brings along."""
        tensor = self.tensor(name, shape, dtype, "input")
        self._inputs.append(tensor)
        self._note_need(tensor)
        return tensor

    def _note_need(self, leaf: VirtualTensor) -> None:
        if self._wanted is not None and leaf.name not in self._wanted:
            self._needless.add(leaf)

    def parameter(
        self, name: str, shape, kind: Kind, *, dtype=torch.float32, **start
    ) -> VirtualTensor:
        """A parameter, the same virtual tensor for each call with the same name; start: see
        Parameter."""
        if name not in self._parameters:
            tensor = self.tensor(name, shape, dtype, role="parameter")
            tensor.declared = Parameter(name=name, shape=tensor.shape, kind=kind, **start)
            self._parameters[name] = tensor
            self._note_need(tensor)
        return self._parameters[name]

    def output(self, tensor: VirtualTensor) -> None:
        """Make `tensor` a result of the program."""
        tensor.role = "output"
        self._outputs.append(tensor)

    def add(self, operation: Operation) -> Operation:
        """Append an operation."""
        self._operations.append(operation)
        needless = self._wanted is not None and self._needless.issuperset(operation.inputs)
        for tensor in operation.outputs:
            self._producers.setdefault(tensor, operation)
            if needless:
                self._needless.add(tensor)
        return operation

    def needs_gradient(self, tensor: VirtualTensor | None) -> bool:
        """Whether anything that needs a gradient gets one by way of that of `tensor`."""
        return tensor is not None and tensor not in self._needless

    def producer(self, tensor: VirtualTensor) -> Operation | None:
        """The operation that wrote `tensor`, if one did."""
        return self._producers.get(tensor)
