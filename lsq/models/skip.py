"""Modules that a user leaves out, by name or by a function."""

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator

from torch import nn

Skip = str | Iterable[str] | Callable[[nn.Module, str], bool]
"""Names or patterns of modules to leave as they are, or a function of a module and its name that
says so."""
SHOWN = 8
"""Names in a message, at most."""


def skipping(skip: Skip, names: Iterable[str]) -> Callable[[nn.Module, str], bool]:
    """Return a function of (module, name) that says whether to leave it as it is.

    `names`: all that there are.

    Raises:
        ValueError: a pattern in `skip` fits no name.
    """
    if callable(skip):
        return skip
    patterns = [skip] if isinstance(skip, str) else list(skip)
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in names):
            every = {part for name in names for part in _ends(name)}
            near = difflib.get_close_matches(pattern, every, n=3)
            last = sorted({name.rpartition(".")[2] for name in names if name})[:SHOWN]
            hint = f"; near are {', '.join(near)}" if near else ""
            hint = hint or (f"; there are {', '.join(last)}" if last else "")
            raise ValueError(
                f"skip names {pattern!r}, but no module of this model is called so{hint}"
            )
    return lambda module, name: any(_fits(name, pattern) for pattern in patterns)


def _fits(name: str, pattern: str) -> bool:
    """Whether a module or one around it has that name, or ends so from a dot on."""
    parts = name.split(".")
    around = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(fnmatch.fnmatchcase(end, pattern) for path in around for end in _ends(path))


def _ends(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))
