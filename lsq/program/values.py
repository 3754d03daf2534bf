"""Values that flow between operations. M rows, N columns, K inputs of a weight."""

from __future__ import annotations

import torch

from lsq.native.launch import FLOATS
from lsq.program.declare import (
    Activations,
    Bits,
    Bytes,
    Codes,
    Floats,
    Host,
    In,
    Key,
    Parameters,
    Value,
    factor,
    size,
)
from lsq.quant import Format, Grain, WeightFormat, arithmetic, random
from lsq.quant.numbers import ScaledFormat

SEEN = ".seen"
"""Ends the name of the input that records the largest magnitude under a clip."""


class Coded(Value):
    """An activation [M, N] as integers: codes * scale. Its gradient is that before the rounding."""

    format: Host[Format]
    codes: Codes
    """[M, N]"""
    scale: Floats
    """[1], or [M] where each row has its own; NaN where a rounded value was NaN.

    The scale of a row is NaN where a value was infinite, too.
    """
    clipped: Bits | None
    """[(M * N + 7) // 8], one bit an element: |x| > clip. Kept where there is a backward pass."""
    error: Floats | None
    """[M, N], (code - x / scale) / Q, 0 where clipped. Kept where clips learn by LSQ."""
    clip: In[Floats] | None
    """[1], the parameter."""
    seen: Floats | None
    """[1], becomes the largest magnitude of what is rounded, if that is more; NaN where one is NaN.
    """
    started: Host[bool] = False
    """Whether an operation before has written the scale: only a NaN changes it (lsq.ops.sums)."""

    @size
    def by_row(self) -> int:
        """Whether each row is rounded under its own largest magnitude, not under the clip."""
        return int(self.format.grain == Grain.ROW)

    @factor
    def largest(self) -> float:
        """Q."""
        return float(self.format.largest)

    @factor
    def clip_factor(self) -> float:
        """Of the sum of a clip's gradient: 1 (PACT), or that of LSQ where an error is kept."""
        return (
            1.0
            if self.error is None
            else arithmetic.lsq_factor(self.error.numel(), self.format.bits)
        )

    def bare(self) -> Coded:
        return Coded(format=self.format, codes=self.codes, scale=self.scale)

    @property
    def scale_of_codes(self) -> torch.Tensor:
        """[1], or [M, 1]."""
        return self.scale[:, None] if self.by_row else self.scale

    @property
    def started_scale(self) -> StartedScale:
        return StartedScale(clip=self.clip, scale=self.scale, largest=self.largest)

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """Reference: the written fields, from x [M, N]."""
        seen = (
            None
            if self.seen is None
            else torch.cat([self.seen, x.detach().abs().flatten()]).amax().view(1)
        )
        if self.by_row:
            codes, scale = arithmetic.nearest_rows(x, self.format.largest)
            return {"codes": codes, "scale": scale, "seen": seen}
        codes, scale, clipped, error = arithmetic.round_activation(
            x, self.clip, bits=self.format.bits, error=self.error is not None
        )
        return {"codes": codes, "scale": scale, "clipped": clipped, "error": error, "seen": seen}

    def decode(self) -> torch.Tensor:
        """Reference: float32 [M, N]."""
        return self.codes.to(torch.float32) * self.scale_of_codes

    def straight_through(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reference: `gradient` [M, N] before the rounding, and that of the clip [1]; all through
        where none learns."""
        if self.clipped is None:
            return gradient, torch.zeros(1, dtype=torch.float32)
        return arithmetic.straight_through(
            gradient, self.codes, self.clipped, self.error, bits=self.format.bits
        )


class StartedScale(Value):
    """The scale of what is rounded under a clip, before it is known whether there is a NaN."""

    clip: In[Floats]
    """[1]"""
    scale: Floats
    """[1]"""
    largest: float
    """Q, the largest code."""


class Rows(Value):
    """An activation [M, N] that a product or attention reads: rounded, or floats in float mode."""

    coded: In[Coded] | None
    floats: In[Activations] | None

    @property
    def tensor(self) -> torch.Tensor:
        return self.floats if self.coded is None else self.coded.codes

    @property
    def scale(self) -> torch.Tensor | float:
        """[1], or [M, 1]."""
        return 1.0 if self.coded is None else self.coded.scale_of_codes

    @property
    def clip(self) -> torch.Tensor | None:
        return self.coded and self.coded.clip

    def bare(self) -> Rows:
        return self if self.coded is None else Rows(coded=self.coded.bare())


class Weight(Value):
    """A weight [N, K]: its codes, and what they were made from; in float mode `values` alone."""

    format: Host[WeightFormat | ScaledFormat | None]
    codes: Codes | None
    """[P, K] where products read them, [P, (K + 31) // 32 * 17] as int4; P at least N: rows beyond
    N hold 0."""
    scale: Floats | None
    """[P]"""
    values: In[Parameters] | None
    """[N, K], the parameter; [K, N] where it is by inputs."""
    clip: In[Floats] | None
    """[N] or [1], the parameter."""
    transposed: Codes | None
    """[K, P], the same codes, as the int8 product that goes back reads them on a GPU."""
    decoded: Floats | None
    """[N, K], in the place of codes: values of a format that has no fast product."""
    grouped: Bytes | None
    """In the place of decoded, without a backward pass: what lsq.ops.grouped_product packs."""
    group: int = 0
    """Group size of `grouped`: values along K whose products are summed as integers."""
    in_out: bool = False
    """Whether values, of what is rounded, are [K, N]; codes are [P, K] all the same."""
    absmax: bool = False
    """Whether its clip is the largest magnitude of each row, so that nothing is clipped."""

    @factor
    def largest(self) -> float:
        """Q, of codes."""
        return 0.0 if self.codes is None else float(self.format.largest)

    @size
    def values_dtype(self) -> int:
        return 0 if self.values is None else FLOATS[self.values.dtype]

    @property
    def written(self) -> tuple:
        """Codes or decoded values, made from values and clip."""
        found = self.codes, self.scale, self.transposed, self.decoded, self.grouped
        return tuple(one for one in found if one is not None)

    @property
    def matrix(self) -> torch.Tensor:
        """The operand of products."""
        return next(one for one in (self.codes, self.decoded, self.values) if one is not None)

    @property
    def operand_in_out(self) -> bool:
        return self.in_out and self.codes is None and self.decoded is None

    @property
    def shape(self) -> tuple[int, int]:
        """[P, K] of codes, or [N, K] of floats."""
        return self.matrix.shape[::-1] if self.operand_in_out else self.matrix.shape

    @property
    def floats_by_rows(self) -> torch.Tensor:
        """The operand of products without codes: float32 [N, K]."""
        return self.values_by_rows if self.decoded is None else self.decoded

    @property
    def values_by_rows(self) -> torch.Tensor:
        """Reference: float32 [N, K]."""
        return (self.values.t() if self.in_out else self.values).float()

    def bare(self) -> Weight:
        """Codes in both layouts and scale alone, of what is rounded."""
        if self.codes is None:
            return self
        return Weight(
            format=self.format,
            codes=self.codes,
            scale=self.scale,
            transposed=self.transposed,
            absmax=self.absmax,
        )


class Dropout(Value):
    """A mask that is drawn again wherever it is needed; see lsq.quant.random."""

    key: In[Key]
    """[1]"""
    subsequence: int
    """Stream of random numbers; each mask of a program has its own."""
    probability: Host[float]

    @size
    def threshold(self) -> int:
        """Elements whose random word lies below are dropped."""
        return random.dropout_threshold(self.probability)

    @factor
    def keep(self) -> float:
        return random.keep_factor(self.probability)

    def apply(self, x: torch.Tensor, element: torch.Tensor | None = None) -> torch.Tensor:
        """Reference: x, any shape, after dropout."""
        return random.dropout(x, self.probability, self.key, self.subsequence, element)


class RoundedGradient(Value):
    """The gradient [M, N] of a product, times the scales of its weight's rows, rounded per row at
    random: so both backward products are exact in the weight's codes.
    """

    format: Host[Format]
    codes: Codes
    """[M, N]"""
    scale: Floats
    """[M]; NaN for a row that holds a NaN or an infinity."""
    weight_scale: In[Floats]
    """[N]"""
    key: In[Key]
    """[1]"""
    subsequence: int

    @factor
    def largest(self) -> float:
        """Q."""
        return float(self.format.largest)

    def encode(
        self, gradient: torch.Tensor, bound: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Reference: the written fields, from `gradient` [M, N]; `bound` [M] in place of the
        largest magnitudes."""
        codes, scale = arithmetic.round_rows(
            gradient, self.weight_scale, self.key, self.subsequence, self.format.largest, bound
        )
        return {"codes": codes, "scale": scale}


def dropped(x: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
    """Reference: x after a dropout that may be missing."""
    return x if dropout is None else dropout.apply(x)
