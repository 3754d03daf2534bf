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
"""Suffix of the input that records the largest magnitude under a clip."""


class Coded(Value):
    """Codes * scale of an activation [M, N]; its gradient is taken before the rounding."""

    format: Host[Format]
    codes: Codes
    """[M, N]"""
    scale: Floats
    """[1], or [M] where each row has its own; NaN if a value under the scale was NaN. The scale of
    a row is also NaN if a value was infinite."""
    clipped: Bits | None
    """[(M * N + 7) // 8], one bit for each element: |x| > clip. Kept for the gradients of clips."""
    error: Floats | None
    """[M, N], (code - x / scale) / Q, 0 where clipped. Kept where LSQ trains the clips."""
    clip: In[Floats] | None
    """[1], the parameter."""
    seen: Floats | None
    """[1], grows to the largest magnitude before the rounding; NaN after a NaN."""
    started: Host[bool] = False
    """Whether an earlier operation wrote the scale; then only a NaN changes it (lsq.ops.sums)."""

    @size
    def by_row(self) -> int:
        """1 where each row is rounded under its own largest magnitude, not under the clip."""
        return int(self.format.grain == Grain.ROW)

    @factor
    def largest(self) -> float:
        """Q, the largest code."""
        return float(self.format.largest)

    @factor
    def clip_factor(self) -> float:
        """Factor of a clip's gradient: 1 for PACT, lsq_factor for LSQ, which keeps an error."""
        return (
            1.0
            if self.error is None
            else arithmetic.lsq_factor(self.error.numel(), self.format.bits)
        )

    def bare(self) -> Coded:
        return Coded(format=self.format, codes=self.codes, scale=self.scale)

    @property
    def scale_of_codes(self) -> torch.Tensor:
        """The scale [1], or [M, 1], as it broadcasts over codes."""
        return self.scale[:, None] if self.by_row else self.scale

    @property
    def started_scale(self) -> StartedScale:
        return StartedScale(clip=self.clip, scale=self.scale, largest=self.largest)

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """Reference: the written fields for x [M, N]."""
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
        """Reference: the values, float32 [M, N]."""
        return self.codes.to(torch.float32) * self.scale_of_codes

    def straight_through(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reference: the gradients (before the rounding [M, N], of the clip [1]). `gradient` [M, N]
        passes unchanged where clips are not learned."""
        if self.clipped is None:
            return gradient, torch.zeros(1, dtype=torch.float32)
        return arithmetic.straight_through(
            gradient, self.codes, self.clipped, self.error, bits=self.format.bits
        )


class StartedScale(Value):
    """A scale that is written before the rounding under a clip, as if no value were NaN."""

    clip: In[Floats]
    """[1]"""
    scale: Floats
    """[1]"""
    largest: float
    """Q, the largest code."""


class Rows(Value):
    """An activation [M, N] that a product or attention reads: codes, or floats in float mode."""

    coded: In[Coded] | None
    floats: In[Activations] | None

    @property
    def tensor(self) -> torch.Tensor:
        return self.floats if self.coded is None else self.coded.codes

    @property
    def scale(self) -> torch.Tensor | float:
        """Factor [1] or [M, 1] of `tensor`; 1.0 for floats."""
        return 1.0 if self.coded is None else self.coded.scale_of_codes

    @property
    def clip(self) -> torch.Tensor | None:
        return self.coded and self.coded.clip

    def bare(self) -> Rows:
        return self if self.coded is None else Rows(coded=self.coded.bare())


class Weight(Value):
    """A weight [N, K]: its codes, and their sources; in float mode `values` alone."""

    format: Host[WeightFormat | ScaledFormat | None]
    codes: Codes | None
    """[P, K] where products read them, [P, (K + 31) // 32 * 17] as int4, [P, S, B] as Fields: S
    spans of B bytes; rows N to P hold 0."""
    scale: Floats | None
    """[P]"""
    values: In[Parameters] | None
    """[N, K], the parameter; [K, N] if `in_out`."""
    clip: In[Floats] | None
    """[N] or [1], the parameter."""
    transposed: Codes | None
    """[K, P], the codes transposed, for the int8 product of the input gradient on a GPU."""
    decoded: Floats | None
    """[N, K], in place of codes: values of a format that has no fast product."""
    grouped: Bytes | None
    """In place of `decoded` in the forward product: packed fields (lsq.ops.packed_weight)."""
    group: int = 0
    """Group size of `grouped`: number of values along K whose products are summed as integers."""
    in_out: bool = False
    """Whether `values` are [K, N]; codes are [P, K] in any case."""
    absmax: bool = False
    """Whether the clips are measured in every pass, so that gradients know no clip."""

    @factor
    def largest(self) -> float:
        """Q, the largest code; 0 without codes."""
        return 0.0 if self.codes is None else float(self.format.largest)

    @property
    def averaged(self) -> bool:
        """Whether the clips are mean magnitudes, which are measured before the weight is rounded;
        rounding itself finds the largest magnitudes of rows."""
        return self.absmax and self.codes is not None and self.format.ternary

    @property
    def new_clip(self) -> torch.Tensor | None:
        """The clips, if rounding measures them."""
        return self.clip if self.absmax and not self.averaged else None

    @size
    def values_dtype(self) -> int:
        return 0 if self.values is None else FLOATS[self.values.dtype]

    @property
    def written(self) -> tuple:
        """The tensors that are made from `values` and `clip`."""
        found = self.codes, self.scale, self.transposed, self.decoded, self.grouped
        return tuple(one for one in found if one is not None)

    @property
    def matrix(self) -> torch.Tensor:
        """The tensor that products read: codes, decoded values, or values."""
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
        """Reference: `values` as float32 [N, K]."""
        return (self.values.t() if self.in_out else self.values).float()

    def bare(self) -> Weight:
        """Return codes, transposed codes and scale alone; a weight without codes stays whole."""
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
    """A mask that is drawn again by each of its readers; see lsq.quant.random."""

    key: In[Key]
    """[1]"""
    subsequence: int
    """Number of the random stream; each mask of a program has its own."""
    probability: Host[float]

    @size
    def threshold(self) -> int:
        """Elements whose random word is below this are dropped."""
        return random.dropout_threshold(self.probability)

    @factor
    def keep(self) -> float:
        return random.keep_factor(self.probability)

    def apply(self, x: torch.Tensor, element: torch.Tensor | None = None) -> torch.Tensor:
        """Reference: x, of any shape, after dropout."""
        return random.dropout(x, self.probability, self.key, self.subsequence, element)


class RoundedGradient(Value):
    """The gradient [M, N] of a product, as codes for the backward products.

    The gradient is multiplied by the scales of the weight's rows, then each row is rounded at
    random. So both backward products add exact products of codes.
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
        """Q, the largest code."""
        return float(self.format.largest)

    def encode(
        self, gradient: torch.Tensor, bound: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Reference: the written fields for `gradient` [M, N]. `bound` [M] replaces the largest
        magnitudes of rows."""
        codes, scale = arithmetic.round_rows(
            gradient, self.weight_scale, self.key, self.subsequence, self.format.largest, bound
        )
        return {"codes": codes, "scale": scale}


def dropped(x: torch.Tensor, dropout: Dropout | None) -> torch.Tensor:
    """Reference: x after `dropout`, or x if that is None."""
    return x if dropout is None else dropout.apply(x)
