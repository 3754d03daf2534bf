"""Measurement of clips on the device of a tensor. R rows, N values in each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lsq import quant
from lsq.ops.fake_quantize import FakeQuantize
from lsq.program.backend import Backend
from lsq.program.declare import Activations, Floats, Host, In, Indices, Out, factor, size
from lsq.program.operation import Operation
from lsq.quant import SMALLEST_CLIP, Format, fill_empty
from lsq.quant.numbers import INTEGERS, Grain, ScaledFormat


class LeastErrorClip(Operation):
    """The clip of least squared rounding error of each row (lsq.quant.octav_clip), in one launch.

    CPU and CUDA compute the same bits: equal candidates, equal order. `clip` may be `before`.
    """

    x: In[Activations]  # [R, N], N at least 1; or [N, R]. NaN and infinity count as 0.
    by_columns: bool = False
    """Whether x is [N, R]; then N is so small that `stride` is 1."""
    bits: Host[int] = 8  # Bits of the codes, 2 to 8.
    before: In[Floats] | None  # [R], earlier clips; the search begins near them.
    clip: Out[Floats]  # [R], at least SMALLEST_CLIP; a row of zeros gets the others' mean.
    unusable: Out[Indices]  # [R], number of values that are NaN or infinite.

    @size
    def rows(self) -> int:
        """R."""
        return self.x.shape[int(self.by_columns)]

    @size
    def columns(self) -> int:
        """N."""
        return self.x.shape[1 - int(self.by_columns)]

    @size
    def stride(self) -> int:
        """Distance between the values of a row that are read."""
        return quant.sample_stride(self.columns)

    @size
    def sampled(self) -> int:
        """Number of values of a row that are read."""
        return -(-self.columns // self.stride)

    @factor
    def largest(self) -> float:
        """The largest code."""
        return float(quant.maximum_code(self.bits))

    @factor
    def smallest(self) -> float:
        """The smallest clip."""
        return quant.SMALLEST_CLIP

    def reference(self):
        rows = self.x.t() if self.by_columns else self.x
        usable = rows.isfinite()
        rows = rows.where(usable, 0.0)
        clip = quant.octav_clip(rows, self.bits, per_channel=True, before=self.before)
        return {"clip": quant.fill_empty(clip), "unusable": (~usable).sum(1)}


class Calibration:
    """Measures clips, one tensor after another, on a backend.

    "mse" does not wait for the device: `finish` names tensors with NaN or infinity.
    """

    def __init__(self, target: Backend):
        self._target = target
        self.written: dict[str, torch.Tensor] = {}  # Name -> clip.
        self._measured: list[tuple[str, torch.Tensor, int]] = []

    @torch.no_grad()
    def measure(
        self,
        name: str,
        x: torch.Tensor,
        clip: torch.Tensor,
        method: str,
        form: Format | ScaledFormat,
        *,
        again: bool = False,
        lenient: bool = False,
        **options,
    ) -> None:
        """Write the clip of x into `clip`, float32 [1] or [R]; see lsq.quant.calibrate.

        Args:
            name: name of x in errors.
            form: format to which x will be rounded.
            again: whether `clip` holds an earlier clip, near which "mse" searches.
            lenient: whether NaN and infinity count as 0 instead of being errors.

        Raises:
            ValueError: as lsq.quant.calibrate, but "mse" leaves NaN and infinity to `finish`.
        """
        with _naming(name):
            if method != "mse":
                values = x.nan_to_num(0.0, 0.0, 0.0) if lenient else x
                found = quant.calibrate(values, method, 8, **options)
                clip.data.copy_(found)  # a counted change would make a backward pass fail
                return
            quant.check_not_empty(x)
        unusable = self._least_error_clip(x, clip, form, again, bool(options.get("per_channel")))
        if not lenient:
            self._measured.append((name, unusable, x.numel()))

    def _least_error_clip(
        self,
        x: torch.Tensor,
        clip: torch.Tensor,
        form: Format | ScaledFormat,
        again: bool,
        per_row: bool,
    ) -> torch.Tensor:
        """Write the clip; return how many values are not finite, in all or of each row."""
        bits = integer_bits(form)
        if bits is None:
            rows = x.detach().float().reshape(-1, x.shape[-1]).contiguous()
            usable = rows.isfinite()
            rows = rows.where(usable, 0.0)
            clip.copy_(least_error_clip(form, rows, self._target, per_row=per_row))
            return (~usable).sum().view(1)
        floats = x.detach() if x.dtype == self._target.activations else x.detach().float()
        rows = floats.reshape(len(x) if per_row else 1, -1)
        unusable = self._target.allocate([len(rows)], torch.int64)
        whole = quant.sample_stride(rows.shape[1]) == 1
        by_columns = whole and not rows.is_contiguous() and rows.t().is_contiguous()
        self._target.run(
            LeastErrorClip(
                x=rows.t() if by_columns else rows.contiguous(),
                by_columns=by_columns,
                bits=bits,
                before=clip if again else None,
                clip=clip,
                unusable=unusable,
            )
        )
        return unusable

    def finish(self) -> None:
        """Wait once for everything measured since the last call.

        Raises:
            ValueError: a tensor held NaN or infinity; the first is named.
        """
        measured, self._measured = self._measured, []
        if not measured:
            return
        counts = torch.cat([unusable for _, unusable, _ in measured]).cpu()
        of_each = counts.split([len(unusable) for _, unusable, _ in measured])
        for (name, _, values), found in zip(measured, of_each, strict=True):
            with _naming(name):
                quant.check_usable(int(found.sum()), values)


def integer_bits(form: Format | ScaledFormat) -> int | None:
    """Return the bits of integers that share a scale as they share a clip, or None."""
    if isinstance(form, Format):
        return form.bits
    plain = form.grain.columns is None and form.scales.fine
    return INTEGERS.get(form.number) if plain else None


@contextlib.contextmanager
def _naming(tensor: str) -> Iterator[None]:
    """Begin the message of a ValueError with the name of a tensor."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{tensor}: {error}") from error


FIRST, LEAST, TRIED, NEAR = 1.0, -6.0, 15, 9
"""Candidates: largest magnitude times 15 powers of two, FIRST to LEAST; then 9 near the best."""
SAMPLE = 65536  # Values read of a tensor with one clip, roughly: whole rows are read.


def least_error_clip(
    form: ScaledFormat, x: torch.Tensor, target: Backend, *, per_row: bool
) -> torch.Tensor:
    """Return the clips float32 [R] or [1] of least error of finite float32 x [R, N], with `target`.

    Clips above the largest magnitude pay for formats that are coarse at their upper end.
    """
    if not per_row:
        x = x[:: max(1, x.numel() // SAMPLE)].contiguous()
    given = form.grain.columns is None if per_row else form.grain == Grain.TENSOR
    largest = x.abs().amax(1, keepdim=True) if per_row else x.abs().amax().view(1, 1)
    out = torch.empty_like(x)

    def error(clip: torch.Tensor) -> torch.Tensor:
        limit = clip.flatten().clamp(min=SMALLEST_CLIP)
        target.run(FakeQuantize(x=x, clip=limit, out=out, form=form, given=given))
        squares = (out - x).square_()
        return squares.sum(1, keepdim=True) if per_row else squares.sum().view(1, 1)

    def best(clips: list[torch.Tensor]) -> torch.Tensor:
        errors = torch.cat([error(clip) for clip in clips], dim=1)
        return torch.cat(clips, dim=1).gather(1, errors.argmin(1, keepdim=True))

    first = FIRST if given else 0.0
    step = (first - LEAST) / (TRIED - 1)
    found = best([largest * 2 ** (first - step * i) for i in range(TRIED)])
    parts = [2 ** (step * (1 - 2 * i / (NEAR - 1))) for i in range(NEAR)]
    found = best([torch.minimum(found * part, largest * 2**first) for part in parts])
    return fill_empty(found.flatten().clamp(min=SMALLEST_CLIP))
