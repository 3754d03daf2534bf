"""What operations ask for, noted where somebody wants to know what is to be tuned."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lsq.gemm.product_key import ProductKey

_notes = threading.local()


@contextmanager
def requested() -> Iterator[list[ProductKey]]:
    """Within this context and thread, a list of the products that operations ask for as they make
    ready to run."""
    before, _notes.found = getattr(_notes, "found", None), []
    try:
        yield _notes.found
    finally:
        _notes.found = before


def note(key: ProductKey) -> None:
    """Say that a product is asked for."""
    if getattr(_notes, "found", None) is not None:
        _notes.found.append(key)
