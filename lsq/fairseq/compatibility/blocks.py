"""Blocks of running text with a NumPy that has no numpy.compat, which fairseq asks for its integers."""

from types import SimpleNamespace

import numpy


class NumPy:
    """numpy as fairseq's token_block_dataset knows it."""

    compat = SimpleNamespace(long=int)

    def __getattr__(self, name: str) -> object:
        return getattr(numpy, name)
