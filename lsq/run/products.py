"""The launches of a program on a GPU, and the keys of its matrix products, without a GPU."""

import torch

from lsq import gemm
from lsq.gemm.product_key import ProductKey, key_of
from lsq.native.launch import Launch, Product
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.samples import placed


def products_of(program: Program, activations: torch.dtype = torch.bfloat16) -> list[ProductKey]:
    """List the products of a program on a GPU, each once, in the order of the program.

    Args:
        program: with or without a backward pass.
        activations: their dtype.

    Raises:
        ValueError: an operation has no CUDA implementation, or cannot take these shapes.
    """
    with gemm.ended_by(None):  # what a kernel of lsq multiplies is a product of cuBLASLt, too
        entries = launched(program, activations)
    return list(dict.fromkeys(key_of(entry) for entry in entries if isinstance(entry, Product)))


def launched(program: Program, activations: torch.dtype) -> list[Launch | Product]:
    """Everything that a GPU does for a program, found without one and without memory.

    Raises:
        ValueError: an operation has no CUDA implementation, or cannot take these shapes.
    """
    return [entry for entries in launched_by_operation(program, activations) for entry in entries]


def launched_by_operation(
    program: Program, activations: torch.dtype
) -> list[list[Launch | Product]]:
    """List launches and products for each operation.

    What several of them read or write is one tensor, on "meta".

    Raises:
        ValueError: see `launched`.
    """
    shared = {}
    return [_entries(operation, activations, shared) for operation in program.operations]


def _entries(
    operation: Operation, activations: torch.dtype, shared: dict
) -> list[Launch | Product]:
    """List what an operation launches; `shared` keeps tensors of several."""
    bound = placed(operation, "meta", activations, shared)
    scratch = [
        torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in bound.cuda_scratch()
    ]
    return bound.cuda(*scratch)
