"""Packing: tokens of padded sentences as rows, one sentence after another, and back.

B sentences, T time, M tokens, H hidden size, R rows: at least M, those from M on are padding.
"""

import torch
from torch import nn
from torch.nn import functional

from lsq.layers.blocks import PackedSequences
from lsq.layers.module import ProgramModule, beside_the_graph
from lsq.run.backends import Backend, for_device
from lsq.run.frames import active_rehearsal


class Packing:
    """The mapping between a padded batch and its packed rows.

    Sizes choose programs, so the CPU computes them, and waits for a padding mask on a GPU.

    Args:
        padding: bool [B, T], True is padding; None: no padding.
        shape: (B, T), for a batch without padding.
        backend: of the modules that will use it; None: the backend of the padding's device.
        few_sizes: round sizes up, see PackedSequences.filled.

    Attributes:
        cu_seqlens: int32 [B + 1], the first row of each sentence, then M; B may be rounded up.
        positions: int64 [R], the position of each row in its sentence; 0 from row M on.
        sentences: the sizes that choose programs.
    """

    def __init__(
        self,
        padding: torch.Tensor | None = None,
        *,
        shape: tuple[int, int] | None = None,
        backend: Backend | None = None,
        few_sizes: bool = False,
    ):
        backend = backend or for_device(torch.device("cpu") if padding is None else padding.device)
        self.shape = batch, time = tuple(shape if padding is None else padding.shape)
        if padding is None:
            lengths, index = torch.full((batch,), time, device="cpu"), None
            positions = torch.arange(time, device="cpu").repeat(batch)
        else:
            present = ~padding.cpu()
            # index: of tokens in the flattened [B, T]
            lengths, index = (present.sum(dim=1), present.flatten().nonzero().squeeze(1))
            positions = (present.cumsum(dim=1) - 1).flatten()[index]
        self.rows = len(positions)
        sentences = PackedSequences(rows=self.rows, count=batch)
        self.sentences = sentences.filled() if few_sizes else sentences
        self._filling = self.sentences.rows - self.rows
        cu_seqlens = torch.full(
            (self.sentences.count + 1,), self.rows, dtype=torch.int32, device="cpu"
        )
        cu_seqlens[: batch + 1] = functional.pad(lengths.cumsum(0), (1, 0))
        kept = [] if self.rows == batch * time else [index]
        positions = functional.pad(positions, (0, self._filling))
        self.cu_seqlens, self.positions, *kept = backend.send([cu_seqlens, positions, *kept])
        self._index = kept[0] if kept else None

    def pack(self, x: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Pack x [B, T, ...] into rows [R, ...], with `fill` from row M on."""
        rows = x.reshape(-1, *x.shape[2:])
        if self._index is not None:
            rows = rows.index_select(0, self._index)
        if not self._filling:
            return rows
        return functional.pad(rows, (0, 0) * (x.dim() - 2) + (0, self._filling), value=fill)

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """Unpack rows [R, H] to [B, T, H], zero in padding."""
        rows = rows[: self.rows]
        if self._index is None:
            return rows.view(*self.shape, rows.shape[1])
        whole = rows.new_zeros(self.shape[0] * self.shape[1], rows.shape[1])
        return whole.index_copy(0, self._index, rows).view(*self.shape, rows.shape[1])


@beside_the_graph
def packing_options(model: nn.Module) -> dict:
    """Return options of Packing for `model`; sizes are exact where padding must not count."""
    modules = [module for module in model.modules() if isinstance(module, ProgramModule)]
    target = modules[0].target
    looked_at = any(module._observer is not None or module.calibration_due() for module in modules)
    exact = not model.training or (looked_at and active_rehearsal.get() is None)
    return {"backend": target, "few_sizes": target.few_sizes and not exact}


def pack_time_major(
    x: torch.Tensor, padding: torch.Tensor | None, width: int, **options
) -> tuple[torch.Tensor, Packing]:
    """Pack x [T, B, H] under padding, bool [B, T] or None; return rows [R, H] and the Packing.

    `options`: of Packing. Raises ValueError for other shapes and empty batches.
    """
    if x.dim() != 3 or x.shape[2] != width or x.numel() == 0:
        raise ValueError(
            f"the input is {tuple(x.shape)}; it must be [time, sentences, {width}] with at least"
            " one word"
        )
    batch, time = x.shape[1], x.shape[0]
    if padding is not None and tuple(padding.shape) != (batch, time):
        raise ValueError(
            f"the padding mask is {tuple(padding.shape)}; for this input it must be {(batch, time)}"
        )
    packing = Packing(
        None if padding is None else padding.to(torch.bool), shape=(batch, time), **options
    )
    return packing.pack(x.transpose(0, 1)), packing


def check_memory(memory: torch.Tensor, x: torch.Tensor) -> None:
    """Raise a ValueError unless encoder output [S, B, H] has B and H of x [T, B, H]."""
    if memory.dim() != 3 or memory.shape[1:] != x.shape[1:]:
        raise ValueError(
            f"the memory is {tuple(memory.shape)}; for an input {tuple(x.shape)} it must be "
            f"[time, {x.shape[1]}, {x.shape[2]}]"
        )


def unpack_time_major(rows: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Unpack rows [R, H] to [T, B, H], zero in padding."""
    return packing.unpack(rows).transpose(0, 1)
