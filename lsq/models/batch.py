"""Masks and rotary embeddings of a batch, which all layers of a model share, read once.

B sequences, T time, D columns of a head.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.nn import functional

from lsq.layers.packing import Packing
from lsq.run.parameter_state import FEW_ROWS, Stamp

Result = TypeVar("Result")
_local = threading.local()
"""Masks of the current batch of each thread: a model has them, and its layers do not know it."""
HIDDEN = -1e4
"""A number that, added to a score, leaves nothing of a probability; so does a smaller one."""
KEPT = 4
"""Results of the last so many masks and rotations: an encoder's and a decoder's, while one calls
another."""


def packing_of(
    mask: torch.Tensor | None,
    shape: tuple[int, int],
    *,
    causal: bool = False,
    window: int | None = None,
    **options,
) -> Packing | None:
    """Return how the tokens that `mask` leaves are packed; None if queries see something else.

    `mask`: None; [B, T], not 0 for tokens; or [B or 1, 1, T or 1, T], bool or 0 where a query sees
    a key. `shape`: (B, T). `causal`, `window`: what queries may see. `options`: of Packing.
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
    """Return how the tokens of an encoder's output that a decoder sees by `mask` are packed.

    `mask`: as of `packing_of`, of T queries and S keys; `shape`: (B, S). None where queries of a
    sequence see different keys, or none.
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
    """cosine, sine [B or 1, T, D] -> (table float32 [P, D], positions int64 [R]), P of few
    values."""

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        (batch, time), half = packing.shape, cosine.shape[2] // 2
        table = torch.cat([cosine[..., :half], sine[..., :half]], dim=2).flatten(0, 1).float()
        positions = torch.arange(len(table), device=table.device).view(len(cosine), time)
        filled = 2 ** (len(table) - 1).bit_length()
        table = functional.pad(table, (0, 0, 0, filled - len(table)))
        return table, packing.pack(positions.expand(batch, time))

    versions = [None if one.is_inference() else one._version for one in (cosine, sine)]
    return remembered("rotation", (cosine, sine, packing), versions, make, exact=False)


def _sees(mask: torch.Tensor, batch: int) -> torch.Tensor | None:
    """Which query sees which key, bool [B, T or 1, S]; None if heads differ, or in part."""
    if mask.shape[1] != 1:
        return None
    sees = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not (sees | (mask <= HIDDEN)).all():
        return None
    return sees.expand(batch, *sees.shape[1:])[:, 0]


def visible(present: torch.Tensor, *, causal: bool, window: int | None = None) -> torch.Tensor:
    """present bool [B, T] -> bool [B, T, T]: which keys each query sees, if `causal` up to its
    own."""
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
    """Return what `make` returned for the same objects and key, with `exact` of the same values."""
    kept = _local.__dict__.setdefault(kind, deque(maxlen=KEPT))
    tensors = [one for one in objects if exact and isinstance(one, torch.Tensor)]
    for references, stamp, kept_key, result in kept:
        same = kept_key == key and all(map(_is_still, references, objects))
        if same and stamp.holds(tensors, rows=FEW_ROWS):
            return result
    with torch.inference_mode(False):  # training may use it as well
        result = make()
    references = [None if one is None else weakref.ref(one) for one in objects]
    kept.append((references, Stamp(tensors), key, result))
    return result


def _is_still(reference: weakref.ref | None, one: object) -> bool:
    return reference is None if one is None else reference is not None and reference() is one
