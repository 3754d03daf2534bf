"""A program as text: one line an operation, then what is saved for the backward pass."""

from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor


def describe(program: Program) -> str:
    """The program with each operation's inputs, outputs, shapes, dtypes and the outputs'
    lifetimes."""
    lines = [
        f"program {program.name}: {program.forward_length} operations forward, "
        f"{len(program.operations) - program.forward_length} backward"
    ]
    for heading, tensors in (("inputs", program.inputs), ("outputs", program.outputs)):
        lines.append(f"  {heading}: " + ", ".join(map(repr, tensors)))
    for index, operation in enumerate(program.operations):
        if index == program.forward_length:
            lines.append("  backward")
        lines.append(
            f"  {index:3d} "
            f" {operation.name}({', '.join(tensor.name for tensor in operation.inputs)})"
        )
        lines.extend(
            f"         -> {_with_lifetime(program, tensor)}" for tensor in operation.outputs
        )
        lines.extend(f"         uses {tensor!r}" for tensor in program.scratch[index])
    lines.append(f"  saved for the backward pass: {program.saved_bytes:,} bytes")
    lines.extend(f"         {tensor!r}: {tensor.size:,} bytes" for tensor in program.saved)
    return "\n".join(lines)


def _with_lifetime(program: Program, tensor: VirtualTensor) -> str:
    first, last = program.lifetimes[tensor]
    return f"{tensor!r}  alive {first}..{last}"
