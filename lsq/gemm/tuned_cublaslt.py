"""Products of cuBLASLt that run as they were tuned: entries become algorithms that the library has checked."""

import logging
from collections import Counter
from typing import Any

import torch

from lsq.gemm.configuration import DECODED, Entry
from lsq.gemm.cublaslt import Algorithm, Products, first_candidate
from lsq.gemm.lookup import Table
from lsq.gemm.product_key import OPERATIONS, ProductKey
from lsq.gemm.product_spec import ProductSpec

logger = logging.getLogger(__name__)


def keys_of(spec: ProductSpec) -> list[ProductKey]:
    """The keys of entries that may serve a product, that of the product by itself first; none for batches of products.

    The library knows no operations, so that the entry of any that multiplies these shapes will do.
    """
    if spec.batch > 1:
        return []
    numbers = {"m": spec.m, "n": spec.n, "k": spec.k, "dtype": _name(spec.dtype), "out": _name(spec.out_dtype)}
    layout = ("t" if spec.transpose_a else "n") + ("n" if spec.transpose_b else "t")
    others = [op for op in OPERATIONS if op != "matmul"] if spec.dtype == torch.int8 else []
    return [ProductKey(op=op, alpha=spec.alpha, layout=layout, **numbers) for op in ["matmul", *others]]


def spec_of(key: ProductKey) -> ProductSpec:
    """The product of packed operands that a key stands for.

    Raises:
        ValueError: cuBLASLt has no such product.
    """
    return ProductSpec(
        m=key.m,
        n=key.n,
        k=key.k,
        dtype=getattr(torch, key.dtype),
        out_dtype=getattr(torch, key.out),
        alpha=key.alpha,
        transpose_a=key.layout[0] == "t",
        transpose_b=key.layout[1] == "n",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def decoded_fault(entry: Entry, algorithm: Algorithm) -> str | None:
    """What an entry says of its algorithm that the bytes do not hold, in words; None where all is as it says."""
    for name in DECODED:
        said, held = getattr(entry.configuration, name), getattr(algorithm, name)
        if said != held:
            return f"{name} is {said} in the file, and its algorithm has {held}"
    return None


class TunedChoice:
    """Picks the algorithms of products from a table: the `choose` of cublaslt.Products.

    Where the library refuses an entry's algorithm, its own first proposal runs; that is warned of once, and counted.

    Args:
        table: the entries.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.refused: Counter[ProductKey] = Counter()
        """How many products ran otherwise than their entry says."""
        self.products: Products
        """What checks the algorithms; to be set before the first product."""

    def __call__(self, spec: ProductSpec, candidates: list[Algorithm]) -> Algorithm:
        """The algorithm for a product."""
        keys = keys_of(spec)
        if not keys:
            return first_candidate(spec, candidates)
        key = next((key for key in keys if self.table.entry(key)), keys[0])
        entry = self.table.lookup(key)
        if entry is None:
            return first_candidate(spec, candidates)
        try:
            return self._checked(spec, entry)
        except (RuntimeError, ValueError) as error:
            if not self.refused:
                logger.warning(
                    "the tuned algorithm of %s is not used: %s. cuBLASLt's own choice runs instead, here and wherever "
                    "else that happens; `lsq configs verify` finds such entries, `lsq tune` replaces them.",
                    key, error,
                )
            self.refused[key.rounded()] += 1
            self.table.refuse(key)
            return first_candidate(spec, candidates)

    def _checked(self, spec: ProductSpec, entry: Entry) -> Algorithm:
        algorithm = self.products.check(spec, entry.configuration.algorithm)
        fault = decoded_fault(entry, algorithm)
        if fault is not None:
            raise ValueError(fault)
        if algorithm.workspace_bytes > self.products.workspace_bytes:
            raise ValueError(
                f"it needs a workspace of {algorithm.workspace_bytes} bytes, of {self.products.workspace_bytes} allowed"
            )
        return algorithm


def tuned_products(device: torch.device, table: Table, **options: Any) -> tuple[Products, TunedChoice]:
    """Products that run as tuned, and what chooses for them.

    Args:
        device: where the tensors lie.
        table: the entries, of this device.
        options: of Products, without `choose`.

    Raises:
        RuntimeError: the library is not found or cannot be loaded.
    """
    choice = TunedChoice(table)
    choice.products = Products(device, choose=choice, **options)
    return choice.products, choice
