"""int8, int8_hier and lean: the mean of all workers' gradients, by two hops of codes.

Each worker owns a shard of the bucket. First hop: every worker sends each owner the codes of its
shard (all-to-all), and the owner adds the values in float32, in the order of ranks. Second hop: the
owner rounds the mean again and sends its codes to all (all-gather), so that all have the same
codes. Scales lie in the messages, beside the codes (Wang et al. 2023, ZeRO++, section 3.3, where
only the first hop is rounded).

A codec says what travels. The second hop of lean has more bits than the first: its values are means
already, so that no other worker's rounding averages its errors out.

Under int8_hier, and lean between several nodes, each worker of a node first gets one piece of every
neighbour's bucket, unrounded, and adds them, fused with the rounding that follows. Workers at the
same position of every node average their pieces as above, so that each piece crosses a node's
network card once in each direction. Then the codes of all pieces are gathered inside the node. A
large bucket goes in parts: the network carries one part while others are packed and summed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
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
from lsq.ops.lean_messages import LeanLayout, LeanMessages, PackLean, SumLean, UnpackLean
from lsq.run import backends

PART = 2**20
"""Values of a bucket that travel together."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How values become messages, and back. A layout is made from (values, shards)."""

    first: Callable[[int, int], MessageLayout] = partial(MessageLayout.for_values, block=BLOCK)
    """Of the first hop."""
    second: Callable[[int, int], MessageLayout] = first
    messages: type = Messages
    packing: type = PackGradients
    summing: type = SumMessages
    unpacking: type = UnpackGradients

    def pack(self, x: Tensor, layout: MessageLayout, messages: Tensor) -> None:
        if x.shape[1] == 0:
            messages.zero_()
            return
        packed = self.messages(layout=replace(layout, values=x.shape[1]), data=messages)
        backends.run(self.packing(x=x, messages=packed))

    def add(
        self,
        messages: Tensor,
        layout: MessageLayout,
        out: Tensor,
        out_layout: MessageLayout,
        factor: float,
    ) -> None:
        given = self.messages(layout=layout, data=messages)
        total = self.messages(layout=out_layout, data=out)
        backends.run(self.summing(messages=given, factor=factor, sum=total))

    def unpack(self, messages: Tensor, layout: MessageLayout, out: Tensor) -> None:
        if out.numel():
            given = self.messages(layout=replace(layout, values=out.numel()), data=messages[None])
            backends.run(self.unpacking(messages=given, x=out))


def lean(first: float, second: float) -> Codec:
    """Return the codec `lean` with these bits a value in each hop."""
    first, second = (partial(LeanLayout.for_values, bits=bits) for bits in (first, second))
    operations = {"packing": PackLean, "summing": SumLean, "unpacking": UnpackLean}
    return Codec(first=first, second=second, messages=LeanMessages, **operations)


CODECS = {"int8": Codec(), "int8_hier": Codec(), "lean": lean(4, 5), "lean5": lean(5, 5.5)}
"""Mode -> its codec."""


class TwoHop:
    """Averages buckets; see the module.

    `group`: the workers that exchange codes, in order of ranks: all, or the workers at this
    position of every node. `scratch`: holds pieces and messages. `neighbours`: the workers of this
    node, in order of ranks; None: this worker is alone.
    """

    def __init__(
        self,
        group: ProcessGroup,
        scratch: Scratch,
        neighbours: ProcessGroup | None = None,
        codec: Codec = CODECS["int8"],
    ):
        self.group, self.scratch, self.neighbours, self.codec = group, scratch, neighbours, codec

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
        codec, workers = self.codec, self.group.size()
        first, second = (make(pieces[0][1], workers) for make in (codec.first, codec.second))
        sent = scratch("sent", (workers, first.message_bytes))
        codec.pack(summands, first, sent)
        received = scratch("received", tuple(sent.shape))
        work = all_to_all(received, sent, self.group)
        yield
        work.wait()
        own_sum = scratch("own", (second.message_bytes,))
        codec.add(received, first, own_sum, second, 1 / (size * workers))
        result = scratch("result", (workers, second.message_bytes))
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
            codec.unpack(messages, second, buffer[start : start + length])


def cut(values: int, pieces: int) -> list[tuple[int, int]]:
    """Return (first value, number of values) of each piece, the longest first, the last perhaps
    empty. Pieces begin at multiples of SHARD_MULTIPLE, so that kernels find them aligned."""
    length = -(-values // (pieces * SHARD_MULTIPLE)) * SHARD_MULTIPLE
    starts = [min(piece * length, values) for piece in range(pieces)]
    return [(start, min(length, values - start)) for start in starts]
