"""Plain data that says what a GPU runs: launches of kernels with their arguments, and matrix
products.

An operation's `cuda` function returns a list of these; lsq.native.device runs it on a GPU or in the
emulator.
"""

from dataclasses import dataclass

import torch

FLOATS = {torch.float32: 0, torch.bfloat16: 1}
"""dtype of activations -> value of -DFLOAT."""


TICKETS = 4096
"""Words of the memory that TICKET stands for."""
TICKET = object()
"""An argument that stands for TICKETS uint32 of zeros. The runner of a list owns them; kernels
leave them at zero."""


def check(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def float_define(*tensors: torch.Tensor | None) -> dict[str, int]:
    """Return -DFLOAT for the dtype that all given tensors share. Raises ValueError: their dtypes
    differ, or kernels do not take the dtype."""
    found = {tensor.dtype for tensor in tensors if tensor is not None}
    check(
        len(found) == 1 and found <= set(FLOATS),
        f"activations are {', '.join(sorted(map(str, found))) or 'missing'}; a CUDA kernel takes"
        f" one dtype of {', '.join(map(str, FLOATS))}: convert them with .to(dtype)",
    )
    return {"FLOAT": FLOATS[found.pop()]}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A function of a file in csrc/cuda, specialised by -D."""

    source: str
    """File name, e.g. "rounding.cu"."""
    name: str
    """Function name, e.g. "lsq_round"."""
    defines: tuple[tuple[str, int], ...] = ()
    """(name, value) of each -D, sorted."""

    def __str__(self) -> str:
        return " ".join([self.name, *(f"-D{name}={value}" for name, value in self.defines)])


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of a kernel.

    The arguments stand for the kernel's parameters: an operation (lsq.program.operation.Operation)
    for its struct, a contiguous tensor or None for a pointer, TICKET, a whole number for int64_t, a
    float for float.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple
    shared: int = 0
    """Bytes of dynamic shared memory."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """out [M, N] = a [M, K] times b [N, K] transposed; see lsq.gemm.product_key. In the plain case,
    the only one for int8, both operands are contiguous along K."""

    a: torch.Tensor
    """[M, K], or [K, M] if `transpose_a`."""
    b: torch.Tensor
    """[N, K], as weights are, or [K, N] if `transpose_b`."""
    out: torch.Tensor
    transpose_a: bool = False
    transpose_b: bool = False
    op: str = "matmul"
    """The operation that reads the result, if tuned files tell it apart; else "matmul"."""


def launch(
    source: str, name: str, *arguments, grid, block=256, shared: int = 0, **defines: int
) -> Launch:
    """Make a launch; grid and block are a whole number or up to three."""
    return Launch(
        kernel=Kernel(source=source, name=name, defines=tuple(sorted(defines.items()))),
        grid=_three(grid),
        block=_three(block),
        arguments=arguments,
        shared=shared,
    )


def _three(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    sizes = size if isinstance(size, tuple) else (size,)
    return (*sizes, 1, 1)[:3]
