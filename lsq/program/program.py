"""A program: the straight-line list of fused operations of one layer, forward then backward."""

from dataclasses import dataclass

from lsq.program.tensor import Operation, VirtualTensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """Operations over virtual tensors, with the lifetime of each.

    `operations[:forward_length]` is the forward pass. `inputs`, `parameters`, `outputs` and `gradients`
    (one for each of `differentiable`, in that order) are the tensors that cross the border.
    """

    name: str
    operations: tuple[Operation, ...]
    forward_length: int
    inputs: tuple[VirtualTensor, ...]
    parameters: tuple[VirtualTensor, ...]
    outputs: tuple[VirtualTensor, ...]
    output_gradients: tuple[VirtualTensor, ...]
    differentiable: tuple[VirtualTensor, ...]
    gradients: tuple[VirtualTensor | None, ...]
    lifetimes: dict[VirtualTensor, tuple[int, int]]
    """First and last operation (both inclusive) that needs the tensor's bytes."""

    @property
    def saved(self) -> tuple[VirtualTensor, ...]:
        """Tensors made in the forward pass that the backward pass reads."""
        borders = {*self.inputs, *self.parameters, *self.output_gradients}
        return tuple(
            tensor
            for tensor, (first, last) in self.lifetimes.items()
            if tensor not in borders and first < self.forward_length <= last and tensor.role != "output"
        )

    @property
    def saved_bytes(self) -> int:
        """Bytes of `saved`."""
        return sum(tensor.size for tensor in self.saved)

    def __str__(self) -> str:
        from lsq.program.text import describe

        return describe(self)


def lifetimes_of(
    operations: tuple[Operation, ...],
    forward_length: int,
    inputs: tuple[VirtualTensor, ...],
    outputs: tuple[VirtualTensor, ...],
    gradients: tuple[VirtualTensor | None, ...],
) -> dict[VirtualTensor, tuple[int, int]]:
    """First and last use of every tensor; outputs live to the end of their pass, inputs from its beginning."""
    lifetimes = {tensor: (0, 0) for tensor in inputs}
    for index, operation in enumerate(operations):
        for tensor in (*operation.inputs, *operation.written):
            if tensor is not None:
                first, _ = lifetimes.get(tensor, (index, index))
                lifetimes[tensor] = (first, index)
    for tensor in outputs:
        first, last = lifetimes[tensor]
        lifetimes[tensor] = (first, max(last, forward_length - 1))
    for tensor in gradients:
        if tensor is not None:
            lifetimes[tensor] = (lifetimes[tensor][0], len(operations) - 1)
    return lifetimes
