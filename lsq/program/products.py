"""The matrix products of a program, as the keys of tuned products: those that its operations ask for."""

import torch

from lsq import gemm
from lsq.csrc.launch import Product
from lsq.gemm.product_key import ProductKey, key_of
from lsq.program import kernels
from lsq.program.program import Program


def products_of(program: Program, kind: str = "cpu", activations: torch.dtype = torch.bfloat16) -> list[ProductKey]:
    """What the operations of a program multiply, each product once, in the order of the program.

    Args:
        program: with or without a backward pass.
        kind: "cpu": the int8 products, as operations ask for their scratch memory; "cuda": all products among what
            they launch, prepared without memory.
        activations: their dtype on a GPU.

    Raises:
        ValueError: an operation has no CUDA implementation, or cannot take these shapes.
    """
    if kind == "cuda":
        listed = kernels.entries(program, kernels.tensors(program, activations))
        found = [key_of(entry) for _, launched in listed for entry in launched if isinstance(entry, Product)]
    else:
        with gemm.requested() as found:
            for operation in program.operations:
                if operation.definition.scratch is not None:
                    operation.definition.scratch(*operation.inputs, **operation.attributes)
    return list(dict.fromkeys(found))
