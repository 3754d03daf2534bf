"""Operands and specs of products, for tests."""

import torch

from lsq.csrc.launch import Product
from lsq.gemm.product_spec import ProductSpec


def product(a, b, out, **options):
    """A product of tensors."""
    return Product(a=a, b=b, out=out, **options)


def codes(*shape):
    """Random int8 codes."""
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def spec(**changes):
    """int8 [41, 64] times [48, 64] transposed to int32, or with changes."""
    return ProductSpec(**{"m": 41, "n": 48, "k": 64, "dtype": torch.int8, "out_dtype": torch.int32} | changes)
