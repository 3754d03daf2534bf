"""Whether what a file of tuned products says still holds: every entry is run, or checked by its library."""

from collections.abc import Callable, Iterator

from lsq.gemm.configuration import ConfigurationFile, CpuConfiguration, Entry
from lsq.gemm.cublaslt import Products
from lsq.gemm.product_key import ProductKey
from lsq.gemm.tuned_cublaslt import decoded_fault, spec_of

LARGEST_OPERANDS = 2**31
"""Bytes of operands, result and reference with which an entry of a CPU is run; larger ones are faults."""

Check = Callable[[Entry], str | None]
"""What is wrong with an entry, in words, or None."""


def verify(file: ConfigurationFile, check: Check) -> Iterator[tuple[Entry, str | None]]:
    """(entry, what is wrong with it or None), for each entry as it is checked."""
    for entry in file.entries:
        yield entry, check(entry)


def cpu_check(exact: Callable[[ProductKey, CpuConfiguration], bool]) -> Check:
    """A check that runs entries on the CPU.

    Args:
        exact: runs a product once as configured, on codes up to +-127, and says whether every sum is exact.
    """

    def check(entry: Entry) -> str | None:
        key = entry.key
        needed = 9 * (key.m * key.k + key.n * key.k) + 16 * key.m * key.n  # int8 and float64; int32, twice, and float64
        if needed > LARGEST_OPERANDS:
            return f"not run: its operands and reference need {needed / 2**30:.1f} GiB; remove the entry"
        try:
            return None if exact(key, entry.configuration) else "its sums are wrong here; tune this product again"
        except (RuntimeError, ValueError) as error:
            return f"it does not run here ({error}); tune this product again"

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
