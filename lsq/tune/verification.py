"""Whether what a file of tuned products says still holds: every entry is run, or checked by its library."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from lsq.gemm.configuration import Configuration, ConfigurationFile, Entry
from lsq.gemm.cublaslt import Products
from lsq.gemm.product_key import ProductKey
from lsq.gemm.tuned_cublaslt import decoded_fault, spec_of

LARGEST_PRODUCT = 2**31
"""Bytes of operands and result up to which an entry is run; a larger one is a fault, for files are not trusted."""

Check = Callable[[Entry], str | None]
"""What is wrong with an entry, in words, or None."""


def verify(file: ConfigurationFile, check: Check) -> Iterator[tuple[Entry, str | None]]:
    """(entry, what is wrong with it or None), for each entry as it is checked."""
    for entry in file.entries:
        yield entry, check(entry)


class Trial(Protocol):
    """One product with its operands, as the tuner has them."""

    def fault(self, configuration: Configuration) -> str | None:
        """Run once and compare with exact arithmetic: what is wrong, or None."""

    def close(self) -> None:
        """Free what was allocated."""


def trial_check(start: Callable[[ProductKey], Trial]) -> Check:
    """A check that runs each entry once.

    Args:
        start: makes the operands of a product; `trial` of the tuner's backends.
    """

    def check(entry: Entry) -> str | None:
        key = entry.key
        needed = key.m * key.k + key.n * key.k + 4 * key.m * key.n
        if needed > LARGEST_PRODUCT:
            return f"not run, because its operands and its result take {needed / 2**30:.1f} GiB; remove the entry"
        try:
            with contextlib.closing(start(key)) as trial:
                fault = trial.fault(entry.configuration)
        except (RuntimeError, ValueError, MemoryError) as error:
            fault = f"it does not run here ({error})"
        return fault and f"{fault}; tune this product again"

    return check


def cublaslt_check(products: Products) -> Check:
    """A check by the library itself (AlgoCheck): nothing runs."""

    def check(entry: Entry) -> str | None:
        try:
            algorithm = products.check(spec_of(entry.key), entry.configuration.algorithm)
        except (RuntimeError, ValueError) as error:
            return f"its algorithm is refused ({error}); tune this product again"
        fault = decoded_fault(entry, algorithm)
        said = entry.configuration.workspace_bytes
        if fault is None and said != algorithm.workspace_bytes:
            fault = f"workspace_bytes is {said} in the file, and its algorithm needs {algorithm.workspace_bytes}"
        return fault and f"{fault}; tune this product again"

    return check
