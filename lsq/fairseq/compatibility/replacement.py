"""Other attributes for a while, where fairseq has no hook of its own."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def replaced(module: object, **attributes: object) -> Iterator[None]:
    """Within this context these attributes of a module are others."""
    before = {name: getattr(module, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
