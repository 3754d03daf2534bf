"""int8 and int8_hier: the mean of all workers' gradients, by two hops of codes.

Each worker owns a shard of the bucket. First hop: every worker sends each owner the codes of its
shard (all-to-all), and the owner adds the values in float32, in the order of ranks. Second hop: the
owner rounds the mean again and sends its codes to all (all-gather), so that all have the same
codes. Scales lie in the messages, beside the codes (Wang et al. 2023, ZeRO++, section 3.3, where
only the first hop is rounded).

Under int8_hier each worker of a node first gets one piece of every neighbour's bucket, unrounded,
and adds them, fused with the rounding that follows. Workers at the same position of every node
average their pieces as above, so that each piece crosses a node's network card once in each
direction. Then the codes of all pieces are gathered inside the node. A large bucket goes in parts:
the network carries one part while others are packed and summed.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

from torch import Tensor
from torch.distributed import ProcessGroup

from lsq.dist.collectives import Scratch, all_gather, all_to_all
from lsq.dist.config import BLOCK
from lsq.ops.gradient_messages import (
    SHARD_MULTIPLE,
    MessageLayout,
    Messages,
    PackGradients,
    SumMessages,
    UnpackGradients,
)
from lsq.run import backends

PART = 2**20
"""Values of a bucket that travel together."""


class TwoHop:
    """Averages buckets; see the module.

    `group`: the workers that exchange codes, in order of ranks: all, or the workers at this
    position of every node. `scratch`: holds pieces and messages. `neighbours`: the workers of this
    node, in order of ranks; None: this worker is alone.
    """

    def __init__(
        self, group: ProcessGroup, scratch: Scratch, neighbours: ProcessGroup | None = None
    ):
        self.group, self.scratch, self.neighbours = group, scratch, neighbours

    def average(self, buffer: Tensor) -> None:
        """Replace `buffer`, float [n], by its mean over all workers."""
        parts = cut(buffer.numel(), -(-buffer.numel() // PART))
        steps = (
            self._steps(number, buffer[first : first + length])
            for number, (first, length) in enumerate(parts)
        )
        # The parts go a step each in turn, so that all workers begin collectives in the same order.
        for _ in zip_longest(*steps):
            pass

    def _steps(self, number: int, buffer: Tensor) -> Iterator[None]:
        """Average one part; yield wherever it would wait."""

        def scratch(name: str, shape: tuple[int, ...], *dtype) -> Tensor:
            return self.scratch.take(f"{name} {number}", shape, *dtype)

        size, position = 1, 0
        if self.neighbours is not None:
            size, position = self.neighbours.size(), self.neighbours.rank()
        pieces = cut(buffer.numel(), size)
        _, own = pieces[position]
        summands = buffer.view(1, -1)
        if self.neighbours is not None:
            summands = scratch("summands", (size, own), buffer.dtype)
            work = all_to_all(
                summands, buffer, self.neighbours, [own] * size, [length for _, length in pieces]
            )
            yield
            work.wait()
        layout = MessageLayout.for_values(pieces[0][1], self.group.size(), block=BLOCK)
        sent = scratch("sent", (self.group.size(), layout.message_bytes))
        pack(summands, layout, sent)
        received = scratch("received", tuple(sent.shape))
        work = all_to_all(received, sent, self.group)
        yield
        work.wait()
        own_sum = scratch("own", (layout.message_bytes,))
        add(received, layout, own_sum, 1 / (size * self.group.size()))
        result = scratch("result", (layout.shards, layout.message_bytes))
        work = all_gather(result, own_sum, self.group)
        yield
        work.wait()
        result = result[None]
        if self.neighbours is not None:
            own_result, result = result, scratch("everything", (size, *result.shape[1:]))
            work = all_gather(result, own_result, self.neighbours)
            yield
            work.wait()
        for messages, (start, length) in zip(result, pieces, strict=True):
            unpack(messages, layout, buffer[start : start + length])


def pack(x: Tensor, layout: MessageLayout, messages: Tensor) -> None:
    if x.shape[1] == 0:
        messages.zero_()
        return
    packed = Messages(layout=replace(layout, values=x.shape[1]), data=messages)
    backends.run(PackGradients(x=x, messages=packed))


def add(messages: Tensor, layout: MessageLayout, out: Tensor, factor: float) -> None:
    given, total = (Messages(layout=layout, data=data) for data in (messages, out))
    backends.run(SumMessages(messages=given, factor=factor, sum=total))


def unpack(messages: Tensor, layout: MessageLayout, out: Tensor) -> None:
    if out.numel():
        layout = replace(layout, values=out.numel())
        backends.run(UnpackGradients(messages=Messages(layout=layout, data=messages[None]), x=out))


def cut(values: int, pieces: int) -> list[tuple[int, int]]:
    """Return (first value, number of values) of each piece, the longest first, the last perhaps
    empty. Pieces begin at multiples of SHARD_MULTIPLE, so that kernels find them aligned."""
    length = -(-values // (pieces * SHARD_MULTIPLE)) * SHARD_MULTIPLE
    starts = [min(piece * length, values) for piece in range(pieces)]
    return [(start, min(length, values - start)) for start in starts]
