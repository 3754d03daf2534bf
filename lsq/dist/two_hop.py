"""int8, int8_hier and int4_hier: the mean of all workers' gradients in two hops of codes, between workers or nodes.

Each worker owns a shard of the bucket. First hop: every worker sends each owner its codes of the owner's shard
(all-to-all); the owner adds up the values in float32, in the order of ranks. Second hop: the owner rounds the mean
once more and sends its codes to all (all-gather). A value is rounded twice whatever the number of workers, and all end
with the same codes. Scales lie in the messages, beside the codes (Wang et al. 2023, ZeRO++, section 3.3; there only the
first hop is rounded).

Inside a node links are fast: under int8_hier and int4_hier each of its workers gets a piece of every neighbour's bucket
as it is and adds them up (a reduce-scatter by all-to-all: sums in float32 in the order of ranks, fused with the
rounding that follows). Workers with the same place on every node then average their pieces as above, so that each piece
crosses a node's network card once in each direction, and the codes of all pieces are gathered inside the node.
"""

from torch import Tensor
from torch.distributed import ProcessGroup

from lsq.dist.codec import Codec
from lsq.dist.collectives import all_gather, all_to_all
from lsq.dist.scratch import Scratch
from lsq.ops.gradient_layout import SHARD_MULTIPLE, MessageLayout


class TwoHop:
    """Averages buckets; see the module.

    Args:
        group: the workers that exchange codes, in order of ranks: all of them, or the one with this one's place on
            every node.
        codec: rounds and packs.
        scratch: holds pieces and messages.
        neighbours: the workers of this node, in order of ranks; None: none but this one.
    """

    def __init__(self, group: ProcessGroup, codec: Codec, scratch: Scratch, neighbours: ProcessGroup | None = None):
        self.group, self.codec, self.scratch, self.neighbours = group, codec, scratch, neighbours

    def average(self, buffer: Tensor, error: Tensor | None = None) -> None:
        """Replace `buffer`, float [n], by its mean over all workers.

        Args:
            error: float32 [n], zero where neighbours own the piece; the own piece gets what rounding took from the
                node's sum. None: not wanted.
        """
        size, place = (self.neighbours.size(), self.neighbours.rank()) if self.neighbours is not None else (1, 0)
        pieces = cut(buffer.numel(), size)
        first, own = pieces[place]
        summands = buffer.view(1, -1)
        if self.neighbours is not None:
            summands = self.scratch.take("summands", (size, own), buffer.dtype)
            all_to_all(summands, buffer, self.neighbours, [own] * size, [length for _, length in pieces])
        layout = self.codec.first_layout(pieces[0][1], self.group.size())
        sent = self.scratch.take("sent", (self.group.size(), layout.message_bytes))
        self.codec.pack(summands, layout, sent, None if error is None else error[first : first + own])
        result = self._exchange(sent, layout, 1 / (size * self.group.size()))[None]
        if self.neighbours is not None:
            own_result, result = result, self.scratch.take("everything", (size, *result.shape[1:]))
            all_gather(result, own_result, self.neighbours)
        for messages, (start, length) in zip(result, pieces, strict=True):
            self.codec.unpack(messages, layout, buffer[start : start + length])

    def _exchange(self, sent: Tensor, layout: MessageLayout, factor: float) -> Tensor:
        """Both hops: the message of every shard uint8 [S, M'] from those that each worker packed, `sent` uint8 [S, M].

        The result is the sum times `factor`, in the layout of the second hop, and in scratch memory.
        """
        received = self.scratch.take("received", tuple(sent.shape))
        all_to_all(received, sent, self.group)
        shape = (layout.shards, self.codec.second_layout(layout).message_bytes)
        own = self.scratch.take("own", shape[1:])
        self.codec.sum(received, layout, own, factor)
        result = self.scratch.take("result", shape)
        all_gather(result, own, self.group)
        return result


def cut(values: int, pieces: int) -> list[tuple[int, int]]:
    """(first value, number of values) of each piece of `values`; the first is the longest, the last may be empty.

    Pieces begin at multiples of SHARD_MULTIPLE, so that kernels find them aligned.
    """
    length = -(-values // (pieces * SHARD_MULTIPLE)) * SHARD_MULTIPLE
    starts = [min(piece * length, values) for piece in range(pieces)]
    return [(start, min(length, values - start)) for start in starts]
