"""Measurement of clips on a sample of a tensor. OCTAV (Sakr et al. 2022, arXiv:2206.06501) finds
the clip of least squared error. R rows, N elements in a row, K candidate clips."""

import math

import torch
from torch import Tensor

from lsq.quant.arithmetic import SMALLEST_CLIP, check_clip, maximum_code

CALIBRATIONS = ("fixed", "absmax", "percentile", "mse")
"""Methods of `calibrate`."""
LARGEST_SAMPLE = 2**18
"""Most values of one tensor or row from which "mse" measures a clip."""


def calibrate(
    x: Tensor,
    method: str,
    bits: int = 8,
    per_channel: bool = False,
    *,
    fixed: float | None = None,
    percentile: float = 99.99,
) -> Tensor:
    """Measure a clip of x: float32 [1], or [R] if `per_channel` (rows), at least SMALLEST_CLIP.

    A row of zeros gets the mean clip of the other rows: gradients carry the scales of rows, so a
    tiny clip would make the gradient of its row vanish.

    Args:
        method: "fixed" (the clip `fixed`), "absmax" (the largest |x|), "percentile" (`percentile` %
            of all |x| lie inside) or "mse" (see octav_clip).

    Raises:
        ValueError: `method` or `percentile` is not allowed, `fixed` is missing or not a usable
            clip, x is empty or holds NaN or infinity.
    """
    if method not in CALIBRATIONS:
        raise ValueError(
            f"calibration method is {method!r}; allowed: {', '.join(map(repr, CALIBRATIONS))}"
        )
    if method == "fixed":
        if fixed is None:
            raise ValueError(
                'calibration method "fixed" was given no clip; pass fixed=<number above 0>'
            )
        clip = torch.full(
            (len(x) if per_channel else 1,), fixed, dtype=torch.float32, device=x.device
        )
        check_clip(clip, "fixed")
        return clip
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile is {percentile!r}; it must be above 0 and at most 100")
    check_not_empty(x)
    if not torch.isfinite(torch.stack(torch.aminmax(x))).all():
        check_usable(x.numel() - int(torch.isfinite(x).sum()), x.numel())
    if method == "mse":
        clip = octav_clip(x, bits, per_channel)
    elif method == "absmax":
        clip = _magnitude_rows(x, per_channel).amax(1)
    else:
        rows = _magnitude_rows(x, per_channel)
        inside = math.ceil(rows.shape[1] * percentile / 100 - 1e-9)
        clip = rows.kthvalue(max(inside, 1), dim=1).values
    return fill_empty(clip.float().clamp(min=SMALLEST_CLIP))


def check_not_empty(x: Tensor) -> None:
    """Raise ValueError if x is empty."""
    if x.numel() == 0:
        raise ValueError(
            f"cannot calibrate on an empty tensor (shape {list(x.shape)}); give it some values"
        )


def check_usable(unusable: int, values: int) -> None:
    """Raise ValueError unless `unusable`, the number of NaN and infinite values, is 0."""
    if unusable:
        raise ValueError(
            f"cannot calibrate on a tensor in which {unusable} of {values} values are NaN or"
            " infinite; find the operation that made them"
        )


def fill_empty(clip: Tensor) -> Tensor:
    """Replace clips [R] of rows of zeros, which are SMALLEST_CLIP, by the mean of the others."""
    empty = clip == SMALLEST_CLIP
    return (
        torch.where(empty, clip[~empty].mean(), clip) if empty.any() and not empty.all() else clip
    )


def octav_clip(
    x: Tensor, bits: int = 8, per_channel: bool = False, *, before: Tensor | None = None
) -> Tensor:
    """Return the clip of least squared quantisation error: OCTAV's fixed point, then a search.

    OCTAV models the squared rounding error of every nonzero |x| <= c as c^2/(12 Q^2). The model is
    inexact for few bits, few samples or rare outliers. So the error itself is measured at 131
    clips: from the fixed point up to the largest |x|, then ever closer around the best. At most
    LARGEST_SAMPLE values of a row are read, evenly spaced.

    A row whose clip `before` has not changed much needs less: the error is measured at 11 clips
    within 31 % of it, then at 11 within 4 % of the best. The whole search is made if the best of
    the first 11 is the first or the last, above 1.5 times the largest |x|, or below 2^-16 of that.

    Takes finite x of any shape and float dtype, and `before` float32 [1] or [R] with any values.
    Returns float32 [1], or [R] if `per_channel`, at least SMALLEST_CLIP.
    """
    maximum = maximum_code(bits)
    rows = _magnitude_rows(x, per_channel)
    rows = rows[:, :: sample_stride(rows.shape[1])]
    if before is None:
        return _search_anew(rows, maximum)
    clip, near = _search_near(rows.float(), before[:, None], maximum)
    if not near.all():
        clip[~near] = _search_anew(rows[~near], maximum)
    return clip


def _search_anew(rows: Tensor, maximum: int) -> Tensor:
    """Return clips [R] of rows [R, N] >= 0."""
    largest = rows.amax(1, keepdim=True).clamp(min=SMALLEST_CLIP)
    rows = (rows / largest).float()
    clip = _octav_fixed_point(rows, maximum)
    floats = {"dtype": torch.float32, "device": rows.device}
    clip = _best_clip(rows, clip ** torch.linspace(1, 0, 33, **floats), maximum)
    clip = _best_clip(rows, clip * torch.linspace(1 / 2, 3 / 2, 33, **floats), maximum)
    clip = _best_clip(rows, clip * torch.linspace(31 / 32, 33 / 32, 65, **floats), maximum)
    return (clip * largest).float().squeeze(1).clamp(min=SMALLEST_CLIP)


def _search_near(rows: Tensor, before: Tensor, maximum: int) -> tuple[Tensor, Tensor]:
    """Return clips [R] near `before` [R, 1] for rows [R, N] >= 0; bool [R]: the best lies there."""
    floats = {"dtype": torch.float32, "device": rows.device}
    candidates = before * torch.linspace(11 / 16, 21 / 16, 11, **floats)
    clip = _best_clip(rows, candidates, maximum)
    largest = rows.amax(1, keepdim=True)
    near = (candidates[:, :1] < clip) & (clip < candidates[:, -1:])
    near &= (clip <= 1.5 * largest) & (largest <= 2**16 * clip)
    clip = _best_clip(rows, clip * torch.linspace(123 / 128, 133 / 128, 11, **floats), maximum)
    return clip.squeeze(1).clamp(min=SMALLEST_CLIP), near.squeeze(1)


def sample_stride(values: int) -> int:
    """Return the stride with which octav_clip reads a row's values. It is odd, to visit every
    column of a matrix whose width is a power of 2."""
    return -(-values // LARGEST_SAMPLE) | 1


def _octav_fixed_point(rows: Tensor, maximum: int) -> Tensor:
    """Return the clips [R, 1] at which OCTAV's error model is stationary, for rows in [0, 1].

    The paper's iteration runs inside a bracket from the sign of the derivative. Without it, it
    would jump for ever across a magnitude that many values share.
    """
    nonzero = (rows > 0).sum(1, keepdim=True)
    clip = rows.mean(1, keepdim=True)
    low, high = torch.zeros_like(clip), torch.ones_like(clip)
    for _ in range(16):
        outside = rows > clip
        count = outside.sum(1, keepdim=True)
        proposal = (rows * outside).sum(1, keepdim=True) / (
            (nonzero - count) / (12 * maximum**2) + count
        )
        rising = proposal > clip
        low, high = torch.where(rising, clip, low), torch.where(rising, high, clip)
        clip = torch.where((low < proposal) & (proposal < high), proposal, (low + high) / 2)
    return clip


def _best_clip(rows: Tensor, candidates: Tensor, maximum: int) -> Tensor:
    """Return the clip [R, 1] of `candidates` [R, K] with the least squared error on rows [R, N] >=
    0. It is the first candidate if all errors are NaN."""
    errors = []
    for clip in candidates.split(1, dim=1):
        ratio = rows / (clip / maximum)
        rounding = ratio.clamp(max=maximum).round_().sub_(ratio)
        errors.append(
            torch.linalg.vector_norm(rounding, dim=1, dtype=torch.float64) * clip.squeeze(1)
        )
    found = torch.stack(errors, dim=1).nan_to_num(nan=torch.inf)
    return candidates.gather(1, found.argmin(1, keepdim=True))


def _magnitude_rows(x: Tensor, per_channel: bool) -> Tensor:
    """Return |x| as [R, N] (per channel) or [1, N], in float64 for float64, else in float32."""
    magnitudes = x.detach().abs().to(torch.promote_types(x.dtype, torch.float32))
    return magnitudes.reshape(len(x) if per_channel else 1, -1)
