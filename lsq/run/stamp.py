"""Whether tensors still hold the values that they held: the one place where that is decided."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence

import torch

from lsq.native import loader

SMALL = 2**12
"""Values of the largest tensor that is compared whole in every pass."""
FEW_ROWS = 64
"""A pass of fewer rows compares samples of larger tensors: to read them whole would take too long.
"""
SAMPLES = 61
"""Values of such a sample."""


class Stamp:
    """A record of tensors, to see later whether they changed.

    PyTorch counts what writes to a tensor and knows where its memory is. It counts nothing that is
    written through `.data`, through arrays of numpy or by another process: on the CPU values are
    compared, all of them by a checksum, or samples. On other devices the answer would have to be
    waited for.

    Args:
        tensors: whatever was read.
        exact: whether all values can be compared later, not samples alone.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, exact: bool = True):
        self.exact = exact
        self._counted = [_counted(tensor) for tensor in tensors]
        self._samples = [_sample(tensor).clone() for tensor in tensors]
        self._sums = [checksum(tensor) if exact else None for tensor in tensors]

    def holds(self, tensors: Sequence[torch.Tensor], *, rows: int = 0) -> bool:
        """Whether no tensor has changed; see `changed`."""
        return not self.changed(tensors, rows=rows)

    def changed(self, tensors: Sequence[torch.Tensor], *, rows: int = 0) -> set[int]:
        """Numbers of the tensors that are not the same memory with the same values.

        `rows`: of the pass that asks; with fewer than FEW_ROWS, some values of large tensors may
        change unseen.
        """
        if len(tensors) != len(self._counted):
            return set(range(max(len(tensors), len(self._counted))))
        return {
            number
            for number, tensor in enumerate(tensors)
            if self._counted[number] != _counted(tensor)
            or not self._same(number, tensor, whole=rows >= FEW_ROWS)
        }

    def same_values(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the first tensors hold the same, wherever they lie; True on other devices than
        the CPU."""
        return self._sums[: len(tensors)] == [checksum(tensor) for tensor in tensors]

    def _same(self, number: int, tensor: torch.Tensor, *, whole: bool) -> bool:
        """Whether a tensor has the values that it had; True on other devices than the CPU."""
        if tensor.device.type != "cpu":
            return True
        total = self._sums[number]
        if whole and total is not None and tensor.numel() > SMALL:
            return total == checksum(tensor)
        return torch.equal(self._samples[number], _sample(tensor))


def checksum(tensor: torch.Tensor) -> int | None:
    """Return a checksum of all values and their order; None on other devices than the CPU."""
    if tensor.device.type != "cpu":
        return None
    values = tensor.detach().contiguous()
    if not loader.available():
        return zlib.crc32(values.view(-1).view(torch.uint8).numpy())
    found = torch.empty(1, dtype=torch.int64, device="cpu")
    loader.call("lsq_checksum", values, values.nbytes, found)
    return found.item()


def _counted(tensor: torch.Tensor) -> tuple:
    """Return what PyTorch counts of a tensor. Inference tensors have no version."""
    version = 0 if tensor.is_inference() else tensor._version
    return weakref.ref(tensor.untyped_storage()), tensor.data_ptr(), version, tensor.shape


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A view of all values of a tensor, or of some all over it; of nothing on other devices than
    the CPU."""
    values = tensor.detach().flatten()
    if tensor.device.type != "cpu":
        return values[:0]
    return values if len(values) <= SMALL else values[:: len(values) // SAMPLES]
