"""One step of Adam on float32 master parameters, which also writes the new weights as int8 codes.

Kingma & Ba 2015 with decoupled weight decay (Loshchilov & Hutter 2019), as in fairseq: the step
size includes the bias correction, and epsilon is added to the uncorrected root. N rows, K columns.
"""

from __future__ import annotations

import functools
import math

import torch

from lsq.native import loader
from lsq.native.launch import check
from lsq.ops.rounding import padded_codes
from lsq.program.declare import Bytes, Floats, Host, In, Offsets, Out, Value, extent, factor, size
from lsq.program.operation import Operation
from lsq.program.values import Weight
from lsq.quant import largest_clips, quantize

RUN, ROWS, NORM_RUN = 1024, 32, 8192
"""Share of one block in each kernel: values, rows to round, values for the norm."""
NUMBERS = 5  # Length of `scalars`.


def scalars(
    learning_rate: float,
    betas: tuple[float, float],
    epsilon: float,
    step: int,
    *,
    weight_decay: float = 0.0,
    torch_epsilon: bool = False,
) -> torch.Tensor:
    """Return the five numbers of a step, float32 [5], which kernels read from memory.

    They are: step size with bias correction, 1 - beta1, 1 - beta2, epsilon, decay. float32 holds
    1 - beta more exactly than beta: 0.001 better than 0.999.

    Args:
        learning_rate: learning rate of this step.
        betas: decay rates of the first and the second moment.
        epsilon: added to the root of the second moment.
        step: number of the step, from 1.
        weight_decay: the weight first loses learning_rate * weight_decay of itself (AdamW).
        torch_epsilon: add epsilon after the bias correction, as torch.optim; fairseq: before.
    """
    correction = math.sqrt(1 - betas[1] ** step)
    return torch.tensor(
        [
            learning_rate * correction / (1 - betas[0] ** step),
            1 - betas[0],
            1 - betas[1],
            epsilon * (correction if torch_epsilon else 1.0),
            learning_rate * weight_decay,
        ],
        dtype=torch.float32,
        device="cpu",
    )


class Adam(Operation):
    """One step of Adam: the new weight and moments, all of one shape, in new memory or in place.

    Raises:
        ValueError: codes are wanted, but the weight's format packs them.
    """

    weight: In[Floats]  # Of any shape; [N, K] where codes are wanted.
    gradient: In[Floats]
    first: In[Floats]  # First moment.
    second: In[Floats]  # Second moment.
    numbers: In[Floats]  # [5], of `scalars`.
    gradient_factor: In[Floats]
    """[1], factor of the gradient; NaN and infinity reach the weight."""
    limit: Host[float] = 0.0
    """Largest relative change of a value, for clips (QuantConfig.clip_step); 0: unlimited."""
    new_weight: Out[Floats]
    new_first: Out[Floats]
    new_second: Out[Floats]
    rounded: Out[Weight] | None
    """Codes [P, K] of the new weight under an updated clip; `values` are not read."""
    new_clip: Out[Floats] | None
    """[N], new clips, the largest magnitudes of the new rows; in the memory of the old clips."""

    def __post_init__(self):
        if self.rounded is not None and self.rounded.format.packed:
            raise ValueError(
                f"Adam writes int8 codes, but those of the format {self.rounded.format.name} are"
                " packed; leave out `rounded`, and round the new weight by RoundWeight"
            )

    @size
    def numel(self) -> int:
        return math.prod(self.weight.shape)

    @size
    def valid(self) -> int:
        """N."""
        return self.weight.shape[0] if self.rounded is not None else 0

    rows = extent(0, "rounded.codes")  # P.
    columns = extent(1, "rounded.codes")  # K.
    clips = extent(0, "rounded.clip")  # N or 1.

    @size
    def limited(self) -> int:
        return int(self.limit > 0)

    @factor
    def lowest(self) -> float:
        """Smallest ratio of a new value to the old value."""
        return 1 - self.limit

    @factor
    def highest(self) -> float:
        """Largest ratio of a new value to the old value."""
        return 1 + self.limit

    def reference(self):
        size, lack1, lack2, epsilon, decay = self.numbers
        scaled = self.gradient * self.gradient_factor
        first = self.first * (1 - lack1) + scaled * lack1
        second = self.second * (1 - lack2) + scaled * lack2 * scaled
        weight = self.weight - self.weight * decay
        weight = weight - first / (second.sqrt() + epsilon) * size
        if self.limited:
            weight = torch.clamp(weight, self.weight * self.lowest, self.weight * self.highest)
        results = {"new_weight": weight, "new_first": first, "new_second": second}
        if self.rounded is None:
            return results
        clip = self.rounded.clip
        clip = clip if self.new_clip is None else largest_clips(weight, clip)
        codes, scale, _ = quantize(weight, clip, self.rounded.format.bits)
        rounded = padded_codes(codes, scale.expand(self.valid), self.rows - self.valid)
        return results | {"rounded": rounded, "new_clip": clip}

    @property
    def blocks(self) -> int:
        """Number of blocks of the kernel."""
        return -(-self.numel // RUN) if self.rounded is None else -(-self.rows // ROWS)


class Table(Value):
    """The Adam operations that one kernel runs together, from `tiles_of`; empty on the CPU."""

    structs: Bytes  # Structs of the operations, one after another.
    tiles: Offsets  # [blocks, 2]: (operation, its tile) of each block.


def tiles_of(counts: dict[int, int]) -> torch.Tensor:
    """Return int32 [blocks, 2], (operation, tile) of each block, from operation -> tiles."""
    with torch.device("cpu"):
        found = [
            torch.stack([torch.full((count,), number), torch.arange(count)], 1)
            for number, count in counts.items()
        ]
        return torch.cat([torch.empty(0, 2, dtype=torch.int64), *found]).to(torch.int32)


class AdamSteps(Operation):
    """Steps of many tensors in one call to C++, or in a few launches.

    Raises:
        ValueError: an operation that rounds comes before one that does not.
    """

    steps: Host[tuple[Adam, ...]]
    """Tensors have fixed addresses, unless structs and tables are written again."""
    plain: In[Table] | None  # Steps without codes; all tables are None on the CPU.
    coded: In[Table] | None  # Steps with codes; operations are numbered as in `plain`.
    shared: In[Table] | None  # Steps whose rows share one clip; a tile is a whole operation.

    def __post_init__(self):
        rounds = [step.rounded is not None for step in self.steps]
        check(
            rounds == sorted(rounds),
            "AdamSteps takes the steps that round after all others; sort them",
        )

    def reference(self):
        for step in self.steps:
            step.store(step.reference())
        return {}

    def cpu(self):
        self._sequence()

    @functools.cached_property
    def _sequence(self):
        return loader.sequence(self.steps)


class GradientNorm(Operation):
    """The norm of the gradients of many steps, without `gradient_factor`."""

    steps: Host[tuple[Adam, ...]]
    table: In[Table] | None  # A tile is a run of NORM_RUN values; None on the CPU.
    norm: Out[Floats]  # [1]

    def reference(self):
        parts = torch._foreach_norm([step.gradient for step in self.steps])
        return {"norm": torch.stack(parts).norm()}

    def cpu(self):
        squares = torch.empty(len(self.steps), dtype=torch.float64)
        # PyTorch's sums depend on the number of threads
        for step, square in zip(self.steps, squares.unbind(), strict=True):
            loader.call("lsq_sum_of_squares", step.gradient, step.numel, square)
        self.norm.copy_(squares.sum().sqrt())
