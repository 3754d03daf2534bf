"""One step of Adam on a matrix whose weight or moments have 8 bits (lsq.quant.compact).

The numbers of the step are those of lsq.ops.adam. N rows, K columns.
"""

from __future__ import annotations

import torch

from lsq.program.declare import Bytes, Codes, Floats, In, Key, Out, Value, extent, size
from lsq.program.operation import Operation
from lsq.quant import compact


class MasterWeight(Value):
    """A weight that a step changes: floats, or codes with their scales."""

    floats: Floats | None  # [N, K]
    codes: Codes | None  # [N, K], which products read.
    remainder: Codes | None  # [N, K]
    scale: Floats | None  # [N]

    def values(self) -> torch.Tensor:
        if self.floats is not None:
            return self.floats
        return compact.join_weight(self.codes, self.remainder, self.scale)


class SplitWeight(Operation):
    """The nearest codes of float values; zeros keep the scale that their row has."""

    values: In[Floats]  # [N, K]
    weight: Out[MasterWeight]

    rows = extent(0, "values")
    columns = extent(1, "values")

    def reference(self):
        codes, remainder, scale = compact.split_weight(
            self.values, self.weight.scale, remainder=self.weight.remainder is not None
        )
        return {"weight": {"codes": codes, "remainder": remainder, "scale": scale}}


class Moment(Value):
    """A moment of Adam: floats, or codes with a scale for each block."""

    floats: Floats | None  # [N, K]
    codes: Bytes | None  # [N, K]
    scale: Floats | None  # [N, B]


class CompactAdam(Operation):
    """One step of Adam in place: weight and moments are read and written.

    NaN and infinity in a gradient make the scales of their row and blocks NaN.
    """

    weight: Out[MasterWeight]
    first: Out[Moment]
    second: Out[Moment]
    gradient: In[Floats]  # [N, K]
    numbers: In[Floats]  # [5], of lsq.ops.adam.scalars.
    gradient_factor: In[Floats]
    """[1], factor of the gradient."""
    key: In[Key]
    """[1], of the random numbers that round."""

    rows = extent(0, "gradient")
    columns = extent(1, "gradient")

    @size
    def blocks(self) -> int:
        """B."""
        return compact.blocks_of(self.gradient.shape[1])

    def reference(self):
        size, lack1, lack2, epsilon, decay = self.numbers
        gradient = self.gradient * self.gradient_factor
        first = self.first.floats
        if first is None:
            first = compact.decode_first(self.first.codes, self.first.scale)
        first = first * (1 - lack1) + gradient * lack1
        second = self.second.floats
        if second is None:
            second = compact.decode_second(self.second.codes, self.second.scale).square()
        second = second * (1 - lack2) + gradient * lack2 * gradient
        roots = second.sqrt()
        weight = self.weight.values()
        weight = weight - weight * decay
        weight = weight - first / (roots + epsilon) * size
        of_first = compact.encode_first(first, self._at(compact.FIRST))
        of_second = compact.encode_second(roots, self._at(compact.SECOND))
        return {
            "weight": self._weight(weight),
            "first": self._moment(self.first, first, of_first),
            "second": self._moment(self.second, second, of_second),
        }

    def _at(self, subsequence: int) -> torch.Tensor:
        return compact.uniform_numbers(self.key, subsequence, self.gradient)

    def _weight(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.weight.floats is not None:
            return {"floats": values}
        codes, remainder, scale = compact.split_weight(
            values,
            self.weight.scale,
            remainder=self.weight.remainder is not None,
            uniform=self._at(compact.WEIGHT),
            dither=compact.dither_of(self.key, self.rows),
        )
        return {"codes": codes, "remainder": remainder, "scale": scale}

    @staticmethod
    def _moment(moment: Moment, values: torch.Tensor, encoded: tuple) -> dict[str, torch.Tensor]:
        if moment.floats is not None:
            return {"floats": values}
        return {"codes": encoded[0], "scale": encoded[1]}
