"""Packing: the real tokens of padded sentences as rows, one sentence after another, and back. Padding is not computed.

B sentences, T time, M real tokens, H hidden.
"""

import torch

from lsq.layers.blocks import Sentences


class Packing:
    """Where the tokens of a padded batch lie among packed rows.

    Args:
        padding: bool [B, T], True is padding; None: no padding.
        shape: (B, T), for a batch without padding.
        device: of the rows, for a batch without padding.

    Attributes:
        starts: int32 [B + 1], the first row of each sentence, and M.
        sentences: the sizes, by which programs are chosen.
    """

    def __init__(
        self, padding: torch.Tensor | None = None, *, shape: tuple[int, int] | None = None,
        device: torch.device | str = "cpu",
    ):
        batch, time = shape if padding is None else padding.shape
        if padding is None:
            lengths, longest = torch.full((batch,), time, device=device), time
            self._index = None
        else:
            present = ~padding
            lengths = present.sum(dim=1)
            longest = int(lengths.max()) if batch else 0
            index = present.flatten().nonzero().squeeze(1)  # of [B, T]
            self._index = None if len(index) == batch * time else index
        self.shape = (batch, time)
        ends = lengths.cumsum(0)
        self.starts = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
        rows = batch * time if self._index is None else len(self._index)
        self.sentences = Sentences.of(rows, batch, longest)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, T, ...] -> [M, ...]."""
        flat = x.reshape(-1, *x.shape[2:])
        return flat if self._index is None else flat.index_select(0, self._index)

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [M, H] -> [B, T, H], zero where there is padding."""
        if self._index is None:
            return rows.view(*self.shape, rows.shape[1])
        whole = rows.new_zeros(self.shape[0] * self.shape[1], rows.shape[1])
        return whole.index_copy(0, self._index, rows).view(*self.shape, rows.shape[1])


def pack_time_major(
    x: torch.Tensor, padding: torch.Tensor | None, width: int
) -> tuple[torch.Tensor, Packing]:
    """Rows [M, H] of x [T, B, H] with padding bool [B, T] or None, and how they were packed.

    Raises:
        ValueError: another shape, no sentence, no word, or a mask that does not fit.
    """
    if x.dim() != 3 or x.shape[2] != width or x.numel() == 0:
        raise ValueError(
            f"the input is {tuple(x.shape)}; it must be [time, sentences, {width}] with at least one word"
        )
    batch, time = x.shape[1], x.shape[0]
    if padding is not None and tuple(padding.shape) != (batch, time):
        raise ValueError(f"the padding mask is {tuple(padding.shape)}; for this input it must be {(batch, time)}")
    packing = Packing(None if padding is None else padding.to(torch.bool), shape=(batch, time), device=x.device)
    return packing.pack(x.transpose(0, 1)), packing


def check_memory(memory: torch.Tensor, x: torch.Tensor) -> None:
    """Refuse a memory [S, B, H] of another batch than x [T, B, H].

    Raises:
        ValueError: it is.
    """
    if memory.dim() != 3 or memory.shape[1:] != x.shape[1:]:
        raise ValueError(
            f"the memory is {tuple(memory.shape)}; for an input {tuple(x.shape)} it must be "
            f"[time, {x.shape[1]}, {x.shape[2]}]"
        )


def unpack_time_major(rows: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Rows [M, H] -> [T, B, H], zero where there is padding."""
    return packing.unpack(rows).transpose(0, 1)
