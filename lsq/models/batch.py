"""Masks and rotary embeddings of a batch: all layers of a model share them, and they are read once.

B sequences, T time, D columns of a head.
"""

import weakref
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch.nn import functional

from lsq.layers.packing import Packing
from lsq.run.parameter_state import FEW_ROWS, Stamp

Result = TypeVar("Result")
_recent: ContextVar[dict[str, deque] | None] = ContextVar("recent", default=None)
"""Recent results of each thread, by kind: layers share them without knowing their model."""
HIDDEN = -1e4
"""This number or a smaller one, added to a score, makes its probability zero."""
KEPT = 4
"""Number of recent results kept of each kind: some for an encoder, some for its decoder."""


def packing_of(
    mask: torch.Tensor | None,
    shape: tuple[int, int],
    *,
    causal: bool = False,
    window: int | None = None,
    **options,
) -> Packing | None:
    """Return the Packing of the tokens that `mask` shows; None if queries see other keys.

    `mask`: None; [B, T], not 0 for tokens; or [B or 1, 1, T or 1, T], True or 0 where a query sees
    a key. `shape`: (B, T). `causal`, `window`: limit what queries see. `options`: of Packing.
    """

    def present_in(mask: torch.Tensor) -> torch.Tensor | None:
        if mask.dim() == 2:
            return (mask != 0).expand(shape)
        sees = _sees(mask, shape[0])
        if sees is None:
            return None
        sees = sees.expand(shape[0], shape[1], shape[1])
        present = sees.any(dim=1)
        there, seen = present[:, :, None], visible(present, causal=causal, window=window)
        return present if torch.equal(sees & there, seen & there) else None

    return _remembered_packing(("packing", causal, window), mask, shape, options, present_in)


def encoder_packing_of(
    mask: torch.Tensor | None, shape: tuple[int, int], **options
) -> Packing | None:
    """Return the Packing of encoder output, of the tokens that `mask` shows to a decoder.

    `mask`: as in `packing_of`, for T queries and S keys. `shape`: (B, S). Returns None if queries
    of a sequence see different keys, or no key.
    """

    def present_in(mask: torch.Tensor) -> torch.Tensor | None:
        sees = (mask != 0).expand(shape)[:, None] if mask.dim() == 2 else _sees(mask, shape[0])
        if sees is None:
            return None
        present = sees[:, 0]
        same = torch.equal(sees, present[:, None].expand_as(sees))
        return present if same and present.any(dim=1).all() else None

    return _remembered_packing(("encoder",), mask, shape, options, present_in)


def _remembered_packing(
    kind: tuple,
    mask: torch.Tensor | None,
    shape: tuple[int, int],
    options: dict,
    present_in: Callable[[torch.Tensor], torch.Tensor | None],
) -> Packing | None:
    if not isinstance(mask, torch.Tensor | None):
        return None

    def make() -> Packing | None:
        present = None if mask is None else present_in(mask)
        if present is None and mask is not None:
            return None
        padding = None if present is None or present.all() else ~present
        return Packing(padding, shape=shape, **options)

    key = shape, *kind, tuple(sorted((name, id(value)) for name, value in options.items()))
    return remembered(kind[0], (mask,), key, make)


def rotation_of(
    cosine: torch.Tensor, sine: torch.Tensor, packing: Packing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (table float32 [P, D], positions int64 [R]) of cosine and sine [B or 1, T, D]."""

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        (batch, time), half = packing.shape, cosine.shape[2] // 2
        table = torch.cat([cosine[..., :half], sine[..., :half]], dim=2).flatten(0, 1).float()
        positions = torch.arange(len(table), device=table.device).view(len(cosine), time)
        filled = 2 ** (len(table) - 1).bit_length()  # so that few programs are built
        table = functional.pad(table, (0, 0, 0, filled - len(table)))
        return table, packing.pack(positions.expand(batch, time))

    versions = [None if one.is_inference() else one._version for one in (cosine, sine)]
    return remembered("rotation", (cosine, sine, packing), versions, make, exact=False)


def _sees(mask: torch.Tensor, batch: int) -> torch.Tensor | None:
    """Return which query sees which key, bool [B, T or 1, S]; None for masks of heads or biases."""
    if mask.shape[1] != 1:
        return None
    sees = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not (sees | (mask <= HIDDEN)).all():
        return None
    return sees.expand(batch, *sees.shape[1:])[:, 0]


def visible(present: torch.Tensor, *, causal: bool, window: int | None = None) -> torch.Tensor:
    """Return which keys each query sees, bool [B, T, T]; `present`: tokens, bool [B, T]."""
    time = present.shape[1]
    if not causal:
        return present[:, None, :].expand(-1, time, -1)
    positions = torch.arange(time, device=present.device)
    distance = positions[:, None] - positions
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return present[:, None, :] & near


def remembered(
    kind: str, objects: tuple, key: object, make: Callable[[], Result], *, exact: bool = True
) -> Result:
    """Return a recent result of `make` for the same objects and key; `exact`: and same values."""
    recent = _recent.get()
    if recent is None:
        _recent.set(recent := {})
    kept = recent.setdefault(kind, deque(maxlen=KEPT))
    tensors = [one for one in objects if exact and isinstance(one, torch.Tensor)]
    for references, stamp, kept_key, result in tuple(kept):  # threads may share a context
        same = kept_key == key and all(map(_is_still, references, objects))
        if same and stamp.holds(tensors, rows=FEW_ROWS):
            return result
    with torch.inference_mode(False):  # training may use it, too
        result = make()
    references = [None if one is None else weakref.ref(one) for one in objects]
    kept.append((references, Stamp(tensors), key, result))
    return result


def _is_still(reference: weakref.ref | None, one: object) -> bool:
    return reference is None if one is None else reference is not None and reference() is one
