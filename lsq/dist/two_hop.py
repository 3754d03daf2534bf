"""int8, int8_hier and int4_hier: the mean of all workers' gradients in two hops of codes, between
workers or nodes.

Each worker owns a shard of the bucket. First hop: every worker sends each owner its codes of the
owner's shard (all-to-all); the owner adds up the values in float32, in the order of ranks. Second
hop: the owner rounds the mean once more and sends its codes to all (all-gather). A value is rounded
twice whatever the number of workers, and all end with the same codes. Scales lie in the messages,
beside the codes (Wang et al. 2023, ZeRO++, section 3.3; there only the first hop is rounded).

Inside a node links are fast: under int8_hier and int4_hier each of its workers gets a piece of
every neighbour's bucket as it is and adds them up (a reduce-scatter by all-to-all: sums in float32
in the order of ranks, fused with the rounding that follows). Workers with the same place on every
node then average their pieces as above, so that each piece crosses a node's network card once in
each direction, and the codes of all pieces are gathered inside the node.

A large bucket goes in parts, so that the network carries one part while codes of others are packed
and summed.
"""

from collections.abc import Iterator
from itertools import zip_longest

from torch import Tensor
from torch.distributed import ProcessGroup

from lsq.dist.codec import Codec
from lsq.dist.collectives import all_gather, all_to_all
from lsq.dist.scratch import Scratch
from lsq.ops.gradient_layout import SHARD_MULTIPLE

PART = 2**20
"""Values of a bucket that travel together."""


class TwoHop:
    """Averages buckets; see the module.

    Args:
        group: the workers that exchange codes, in order of ranks: all of them, or the one with this
            one's place on every node.
        codec: rounds and packs.
        scratch: holds pieces and messages.
        neighbours: the workers of this node, in order of ranks; None: none but this one.
    """

    def __init__(
        self,
        group: ProcessGroup,
        codec: Codec,
        scratch: Scratch,
        neighbours: ProcessGroup | None = None,
    ):
        self.group, self.codec, self.scratch, self.neighbours = group, codec, scratch, neighbours

    def average(self, buffer: Tensor, error: Tensor | None = None) -> None:
        """Replace `buffer`, float [n], by its mean over all workers.

        Args:
            error: float32 [n], zero where neighbours own the piece; the own piece gets what
                rounding took from the node's sum. None: not wanted.
        """
        parts = cut(buffer.numel(), -(-buffer.numel() // PART))
        steps = (
            self._steps(
                number,
                *(None if one is None else one[first : first + length] for one in (buffer, error)),
            )
            for number, (first, length) in enumerate(parts)
        )
        # Each part goes a step, then each the next one: all workers begin collectives in the same
        # order.
        for _ in zip_longest(*steps):
            pass

    def _steps(self, number: int, buffer: Tensor, error: Tensor | None) -> Iterator[None]:
        """The same of one part; it stops wherever it would wait."""

        def scratch(name: str, shape: tuple[int, ...], *dtype) -> Tensor:
            return self.scratch.take(f"{name} {number}", shape, *dtype)

        size, place = (
            (self.neighbours.size(), self.neighbours.rank())
            if self.neighbours is not None
            else (1, 0)
        )
        pieces = cut(buffer.numel(), size)
        first, own = pieces[place]
        summands = buffer.view(1, -1)
        if self.neighbours is not None:
            summands = scratch("summands", (size, own), buffer.dtype)
            work = all_to_all(
                summands, buffer, self.neighbours, [own] * size, [length for _, length in pieces]
            )
            yield
            work.wait()
        layout = self.codec.first_layout(pieces[0][1], self.group.size())
        sent = scratch("sent", (self.group.size(), layout.message_bytes))
        self.codec.pack(
            summands, layout, sent, None if error is None else error[first : first + own]
        )
        received = scratch("received", tuple(sent.shape))
        work = all_to_all(received, sent, self.group)
        yield
        work.wait()
        shape = (layout.shards, self.codec.second_layout(layout).message_bytes)
        own_sum = scratch("own", shape[1:])
        self.codec.sum(received, layout, own_sum, 1 / (size * self.group.size()))
        result = scratch("result", shape)
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
            self.codec.unpack(messages, layout, buffer[start : start + length])


def cut(values: int, pieces: int) -> list[tuple[int, int]]:
    """(first value, number of values) of each piece of `values`; the first is the longest, the last
    may be empty.

    Pieces begin at multiples of SHARD_MULTIPLE, so that kernels find them aligned.
    """
    length = -(-values // (pieces * SHARD_MULTIPLE)) * SHARD_MULTIPLE
    starts = [min(piece * length, values) for piece in range(pieces)]
    return [(start, min(length, values - start)) for start in starts]
