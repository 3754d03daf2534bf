"""Operands and keys of products, for tests."""

import torch

from lsq.gemm.product_key import ProductKey
from lsq.native.launch import Product


def product(a, b, out, **options):
    """A product of tensors."""
    return Product(a=a, b=b, out=out, **options)


def codes(*shape):
    """Random int8 codes."""
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def matmul(**changes):
    """The key of int8 [41, 64] times [48, 64] transposed to int32 by itself, or with changes."""
    return ProductKey(**{"m": 41, "n": 48, "k": 64} | changes)


def asked(op, m, n, k):
    """The key of what an operation multiplies."""
    return ProductKey(op=op, m=m, n=n, k=k)


def run(products, product, workspace):
    """Run one product by itself, on the CPU."""
    products.prepare(product).native.run(
        [tensor.data_ptr() for tensor in (product.a, product.b, product.out)],
        workspace=workspace.data_ptr(),
        workspace_bytes=workspace.nbytes,
    )
