"""The words of a vocabulary that mean something to a search."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Symbols:
    """Numbers of special words; the defaults are those of fairseq's dictionaries, and so of lsq's
    own."""

    start: int = 2
    """What every hypothesis begins with, before its first word; fairseq's translation begins with
    the end."""
    padding: int = 1
    """Never chosen."""
    end: int = 2
    unknown: int = 3
