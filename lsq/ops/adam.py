"""One step of Adam on a float32 master weight, and the new weight as int8 codes in both layouts, in one pass.

Kingma & Ba 2015 with decoupled weight decay (Loshchilov & Hutter 2019), in fairseq's form: the bias correction is part
of the step size, and epsilon is added to the plain square root. N rows, K columns.
"""

from __future__ import annotations

import math

import torch

from lsq.csrc.launch import TICKET, check, launch
from lsq.ops.kernels import check_columns
from lsq.program.declare import Codes, Floats, In, Out, extent, size
from lsq.program.operation import Operation
from lsq.program.values import Weight
from lsq.quant import quantize

ROWS, COLUMNS, BLOCK = 32, 128, 1024
"""What a block of each kernel updates: a tile of a matrix, or a run of values."""


def scalars(
    learning_rate: float, betas: tuple[float, float], epsilon: float, step: int, *, weight_decay: float = 0.0,
    factor: float = 1.0, torch_epsilon: bool = False,
) -> torch.Tensor:
    """The six numbers of a step, float32 [6], which a captured graph reads from device memory.

    They are: step size with bias correction, 1 - beta1, 1 - beta2, epsilon, decay, factor of the gradient. Betas are
    kept as what they lack to 1, because float32 knows 0.001 better than 0.999.

    Args:
        learning_rate: of this step.
        betas: decay of the first and of the second moment.
        epsilon: added to the root of the second moment.
        step: counted from 1.
        weight_decay: the weight first loses learning_rate * weight_decay of itself (AdamW; fairseq's "adam").
        factor: what the gradient is multiplied by: 1 / loss scale * clipping. NaN and infinity reach the weight.
        torch_epsilon: add epsilon after the bias correction, as torch.optim does; fairseq adds it before.
    """
    correction = math.sqrt(1 - betas[1] ** step)
    return torch.tensor([
        learning_rate * correction / (1 - betas[0] ** step), 1 - betas[0], 1 - betas[1],
        epsilon * (correction if torch_epsilon else 1.0), learning_rate * weight_decay, factor,
    ])  # fmt: skip


class Adam(Operation):
    """The new weight and moments, all of one shape; what is written may be the memory of what is read.

    Raises:
        ValueError: transposed codes are wanted, but no codes; or the weight's format packs its codes.
    """

    weight: In[Floats]
    """[N, K] where codes are wanted, else of any shape."""
    gradient: In[Floats]
    first: In[Floats]
    """Moment."""
    second: In[Floats]
    """Moment."""
    numbers: In[Floats]
    """[6], see `scalars`."""
    new_weight: Out[Floats]
    new_first: Out[Floats]
    new_second: Out[Floats]
    rounded: Out[Weight] | None
    """The codes [P, K] of the new weight under a clip that was updated before; its `values` are not looked at."""
    transposed: Out[Codes] | None
    """[K, P], the same codes."""

    def __post_init__(self):
        check(
            self.rounded is not None or self.transposed is None,
            "Adam was given memory for transposed codes, but not for codes; give it both",
        )
        if self.rounded is not None and self.rounded.format.packed:
            raise ValueError(
                f"Adam writes int8 codes, but those of the format {self.rounded.format.name} are packed; leave out"
                " `rounded`, and round the new weight by RoundWeight"
            )

    @size
    def numel(self) -> int:
        return math.prod(self.weight.shape)

    @size
    def valid(self) -> int:
        """N."""
        return self.weight.shape[0] if self.rounded is not None else 0

    rows = extent(0, "rounded.codes")
    """P."""
    columns = extent(1, "rounded.codes")
    """K."""
    clips = extent(0, "rounded.clip")
    """N or 1."""

    def reference(self):
        size, lack1, lack2, epsilon, decay, factor = self.numbers
        scaled = self.gradient * factor
        first = self.first * (1 - lack1) + scaled * lack1
        second = self.second * (1 - lack2) + scaled * lack2 * scaled
        weight = self.weight - self.weight * decay
        weight = weight - first / (second.sqrt() + epsilon) * size
        if self.rounded is None:
            return weight, first, second, None, None, None
        codes, scale, _ = quantize(weight, self.rounded.clip, self.rounded.format.bits)
        padding = self.rows - self.valid
        codes = torch.nn.functional.pad(codes, (0, 0, 0, padding))
        scale = torch.nn.functional.pad(scale.expand(self.valid), (0, padding), value=1.0)
        return weight, first, second, codes, scale, codes.t()

    def cuda(self):
        if self.rounded is None:
            return [launch("adam.cu", "lsq_adam", self, grid=max(1, -(-self.numel // BLOCK)))]
        check_columns(16, **{"the width of a weight": self.columns})
        if self.transposed is not None:
            check_columns(16, **{"the number of rows of a weight whose codes are transposed": self.rows})
        return [
            launch(
                "adam.cu", "lsq_adam_codes", self, TICKET, grid=(-(-self.rows // ROWS), -(-self.columns // COLUMNS)),
            )
        ]  # fmt: skip
