"""A program: the straight-line list of fused operations of one layer, forward then backward."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lsq.program.operation import Operation
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Weight


@dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """Operations over virtual tensors, and the lifetimes of the tensors.

    `operations[:forward_length]` is the forward pass. `inputs`, `parameters`, `outputs` and
    `gradients` cross the program's border. Each of `gradients` belongs to the tensor of
    `differentiable` at the same index.
    """

    name: str
    operations: tuple[Operation, ...]
    scratch: tuple[tuple[VirtualTensor, ...], ...]
    forward_length: int
    inputs: tuple[VirtualTensor, ...]
    parameters: tuple[VirtualTensor, ...]
    weights: dict[str, Weight]
    """Parameter name -> weight; codes and scales of rounded weights are among the inputs."""
    activations: dict[str, VirtualTensor]
    """Name of an activation that may be rounded -> tensor that is read, codes or floats. The name
    is that of the clip without _clip."""
    outputs: tuple[VirtualTensor, ...]
    output_gradients: tuple[VirtualTensor, ...]
    differentiable: tuple[VirtualTensor, ...]
    gradients: tuple[VirtualTensor | None, ...]
    lifetimes: dict[VirtualTensor, tuple[int, int]]
    """Tensor -> first and last operation (both inclusive) that needs its bytes."""

    @cached_property
    def prepared(self) -> dict:
        """Prepared passes outside planned memory (lsq.run.frames), kept as long as the program."""
        return {}

    @cached_property
    def draws(self) -> bool:
        return any(
            tensor.name == "random_key"
            for operation in self.operations
            for tensor in operation.inputs
        )

    @property
    def backward_range(self) -> range:
        return range(self.forward_length, len(self.operations))

    @cached_property
    def outputs_of(self) -> tuple[tuple[VirtualTensor, ...], ...]:
        """For each operation, the outputs that no earlier operation writes."""
        found, before = [], set(self.inputs)
        for operation in self.operations:
            found.append(tuple(tensor for tensor in operation.outputs if tensor not in before))
            before.update(operation.outputs)
        return tuple(found)

    @cached_property
    def dying(self) -> tuple[tuple[VirtualTensor, ...], ...]:
        """For each operation, the tensors that no later one needs; outputs and gradients stay."""
        used = ((*one.inputs, *one.outputs) for one in self.operations)
        return tuple(
            tuple(
                tensor
                for tensor in dict.fromkeys(tensors)
                if self.lifetimes[tensor][1] == index and tensor.role not in ("output", "gradient")
            )
            for index, tensors in enumerate(used)
        )

    @cached_property
    def _written(self) -> tuple[tuple[VirtualTensor, ...], ...]:
        pairs = zip(self.outputs_of, self.scratch, strict=True)
        return tuple((*outputs, *scratch) for outputs, scratch in pairs)

    def written(self, index: int) -> tuple[VirtualTensor, ...]:
        """Return the tensors to allocate for operation `index`: its outputs, then its scratch."""
        return self._written[index]

    @property
    def saved(self) -> tuple[VirtualTensor, ...]:
        """Temporary tensors that the forward pass writes and the backward pass reads."""
        borders = {*self.inputs, *self.parameters, *self.output_gradients}
        return tuple(
            tensor
            for tensor, (first, last) in self.lifetimes.items()
            if tensor not in borders
            and first < self.forward_length <= last
            and tensor.role != "output"
        )

    @property
    def saved_bytes(self) -> int:
        return sum(tensor.size for tensor in self.saved)

    def __str__(self) -> str:
        """Return the operations as text, with shapes, dtypes and lifetimes."""
        lines = [
            f"program {self.name}: {self.forward_length} operations forward, "
            f"{len(self.operations) - self.forward_length} backward"
        ]
        for heading, tensors in (("inputs", self.inputs), ("outputs", self.outputs)):
            lines.append(f"  {heading}: " + ", ".join(map(repr, tensors)))
        for index, operation in enumerate(self.operations):
            if index == self.forward_length:
                lines.append("  backward")
            read = ", ".join(tensor.name for tensor in operation.inputs)
            lines.append(f"  {index:3d}  {operation.name}({read})")
            for tensor in operation.outputs:
                first, last = self.lifetimes[tensor]
                lines.append(f"         -> {tensor!r}  alive {first}..{last}")
            lines += [f"         uses {tensor!r}" for tensor in self.scratch[index]]
        lines.append(f"  saved for the backward pass: {self.saved_bytes:,} bytes")
        lines += [f"         {tensor!r}: {tensor.size:,} bytes" for tensor in self.saved]
        return "\n".join(lines)


def lifetimes_of(
    used: Sequence[Sequence[VirtualTensor]],
    forward_length: int,
    inputs: tuple[VirtualTensor, ...],
    outputs: tuple[VirtualTensor, ...],
    gradients: tuple[VirtualTensor | None, ...],
) -> dict[VirtualTensor, tuple[int, int]]:
    """Return the first and last use of every tensor in `used`: the tensors of each operation.
    Outputs live to the end of their pass, inputs from the beginning of the program."""
    lifetimes = {tensor: (0, 0) for tensor in inputs}
    for index, tensors in enumerate(used):
        for tensor in tensors:
            first, _ = lifetimes.get(tensor, (index, index))
            lifetimes[tensor] = (first, index)
    for tensor in outputs:
        first, last = lifetimes[tensor]
        lifetimes[tensor] = (first, max(last, forward_length - 1))
    for tensor in gradients:
        if tensor is not None:
            lifetimes[tensor] = (lifetimes[tensor][0], len(used) - 1)
    return lifetimes
