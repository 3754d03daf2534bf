"""The exchanges of lsq.dist with all workers in one process: the same rounding and sums, without a
network.

Workers hand in their gradients one after another; what is kept of each is what it would send.
Letters: N workers, v values.
"""

import torch
from torch import Tensor

from lsq.dist.codec import Codec
from lsq.dist.config import GradientConfig, gcq_levels
from lsq.dist.gcq import decode, encode, row_scales
from lsq.dist.two_hop import cut

CPU = torch.device("cpu")
BLOCK = GradientConfig().block


class Exact:
    """The mean in float64.

    Args:
        workers: N.
        values: v.
    """

    def __init__(self, workers: int, values: int):
        self.workers = workers
        self.sum = torch.zeros(values, dtype=torch.float64)

    def add(self, gradient: Tensor) -> None:
        """Take the next worker's gradient, float32 [v]."""
        self.sum += gradient

    def mean(self) -> Tensor:
        """The mean [v] of the N gradients that were handed in."""
        return self.sum / self.workers


class Noisy(Exact):
    """The mean, and noise of the size of one rounding of int8: what any error of that size makes of
    a training."""

    def mean(self) -> Tensor:
        """See Exact."""
        mean = super().mean()
        blocks = torch.nn.functional.pad(mean, (0, -len(mean) % BLOCK)).view(-1, BLOCK)
        deviation = blocks.abs().amax(1, keepdim=True) / 127 / 12**0.5
        return (blocks + deviation * torch.randn_like(blocks)).view(-1)[: len(mean)]


class Ring:
    """PyTorch's bf16 hook: gradients are rounded to `dtype`, divided by N, and every partial sum is
    rounded.

    Sums run in the order of ranks here; in a ring each piece begins at another rank.
    """

    def __init__(self, workers: int, values: int, dtype: torch.dtype = torch.bfloat16):
        self.workers = workers
        self.sum = torch.zeros(values, dtype=dtype)

    def add(self, gradient: Tensor) -> None:
        """See Exact."""
        self.sum += gradient.to(self.sum.dtype).div_(self.workers)

    def mean(self) -> Tensor:
        """See Exact."""
        return self.sum.float()


class TwoHop:
    """Modes int8 (nodes of one worker), int8_hier and int4_hier.

    Args:
        workers: N.
        values: v.
        node_size: workers of a node, a divisor of N; their sum in floats is what is rounded.
        bits: of the codes on the first hop.
        stochastic: whether to round at random.
        block: values that share a scale.
    """

    def __init__(
        self,
        workers: int,
        values: int,
        *,
        node_size: int = 1,
        bits: int = 8,
        stochastic: bool = False,
        block: int = BLOCK,
    ):
        self.workers, self.values, self.nodes = workers, values, workers // node_size
        self.pieces = cut(values, node_size) if node_size > 1 else [(0, values)]
        rounding = {"block": block, "first_bits": bits, "stochastic": stochastic, "device": CPU}
        self.codecs = [Codec(**rounding, seed=rank) for rank in range(workers)]
        self.layout = self.codecs[0].first_layout(self.pieces[0][1], self.nodes)
        shape = (node_size, self.nodes, self.layout.shards, self.layout.message_bytes)
        self.sent = torch.empty(shape, dtype=torch.uint8)
        self.waiting: list[Tensor] = []
        self.packed = 0

    def add(self, gradient: Tensor) -> None:
        """See Exact."""
        self.waiting.append(gradient)
        if len(self.waiting) < len(self.pieces):
            return
        for place, (start, length) in enumerate(self.pieces):
            summands = torch.stack([waiting[start : start + length] for waiting in self.waiting])
            self._codec(self.packed, place).pack(
                summands, self.layout, self.sent[place, self.packed]
            )
        self.waiting.clear()
        self.packed += 1

    def mean(self) -> Tensor:
        """See Exact."""
        out = torch.empty(self.values)
        for place, (start, length) in enumerate(self.pieces):
            second = self._codec(0, place).second_layout(self.layout)
            result = torch.empty(self.nodes, second.message_bytes, dtype=torch.uint8)
            for owner in range(self.nodes):
                received = self.sent[place, :, owner].contiguous()
                self._codec(owner, place).sum(
                    received, self.layout, result[owner], 1 / self.workers
                )
            self._codec(0, place).unpack(result, self.layout, out[start : start + length])
        return out

    def _codec(self, node: int, place: int) -> Codec:
        return self.codecs[node * len(self.pieces) + place]


class GCQ:
    """Mode gcq.

    What workers send depends on the clips of all, so that their gradients are kept until the end.

    Args:
        workers, values: as for Exact.
        quantile: share of the magnitudes of a row of 1,024 values that lie within its clip.

    Raises:
        ValueError: so many workers leave no code but 0.
    """

    ROW = 1024

    def __init__(self, workers: int, values: int, *, quantile: float):
        self.workers, self.values, self.quantile = workers, values, quantile
        self.levels = gcq_levels(workers)
        self.rows: list[Tensor] = []

    def add(self, gradient: Tensor) -> None:
        """See Exact."""
        self.rows.append(
            torch.nn.functional.pad(gradient, (0, -self.values % self.ROW)).view(-1, self.ROW)
        )

    def mean(self) -> Tensor:
        """See Exact."""
        scales = torch.stack([row_scales(rows, self.values, self.quantile) for rows in self.rows])
        scale = scales.amax(0)
        total = torch.zeros(self.rows[0].shape, dtype=torch.int8)
        codes = torch.empty_like(total)
        for rows in self.rows:
            encode(rows, scale, self.workers, self.levels, codes)
            total += codes
        return decode(total, scale).view(-1)[: self.values]


def relative_error(found: Tensor, exact: Tensor) -> float:
    """||found - exact|| / ||exact||, in float64."""
    return ((found.double() - exact).norm() / exact.norm()).item()
