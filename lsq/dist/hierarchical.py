"""int8_hier and int4_hier: floats inside a node, codes between nodes.

Inside a node links are fast: each of its workers gets a piece of every neighbour's bucket as it is and adds them up
(a reduce-scatter by all-to-all: sums in float32 in the order of ranks, fused with the rounding that follows). Workers
with the same place on every node then average their pieces as two_hop does, so that each piece crosses a node's network
card once in each direction, and the codes of all pieces are gathered inside the node.
"""

from torch import Tensor
from torch.distributed import ProcessGroup

from lsq.dist.codec import Codec
from lsq.dist.collectives import all_gather, all_to_all
from lsq.dist.scratch import Scratch
from lsq.dist.two_hop import exchange_mean
from lsq.ops.gradient_layout import SHARD_MULTIPLE


class Hierarchical:
    """Averages buckets over nodes; see the module.

    Args:
        neighbours: the workers of this node, in order of ranks.
        counterparts: the worker with this one's place on every node, in order of nodes.
        codec: rounds and packs.
        scratch: holds pieces and messages.
    """

    def __init__(self, neighbours: ProcessGroup, counterparts: ProcessGroup, codec: Codec, scratch: Scratch):
        self.neighbours, self.counterparts = neighbours, counterparts
        self.codec, self.scratch = codec, scratch

    def average(self, buffer: Tensor, error: Tensor | None = None) -> None:
        """Replace `buffer`, float [n], by its mean over all workers of all nodes.

        Args:
            error: float32 [n], zero where other workers of the node own the piece; the own piece gets what rounding
                took from the node's sum. None: not wanted.
        """
        size, nodes = self.neighbours.size(), self.counterparts.size()
        pieces = cut(buffer.numel(), size)
        place = self.neighbours.rank()
        first, own = pieces[place]
        summands = self.scratch.take("summands", (size, own), buffer.dtype)
        all_to_all(summands, buffer, self.neighbours, [own] * size, [length for _, length in pieces])
        layout = self.codec.first_layout(pieces[0][1], nodes)
        sent = self.scratch.take("sent", (nodes, layout.message_bytes))
        self.codec.pack(summands, layout, sent, None if error is None else error[first : first + own])
        result = exchange_mean(sent, layout, self.counterparts, self.codec, self.scratch, 1 / (size * nodes))
        everything = self.scratch.take("everything", (size, *result.shape))
        all_gather(everything, result, self.neighbours)
        for messages, (start, length) in zip(everything, pieces, strict=True):
            self.codec.unpack(messages, layout, buffer[start : start + length])


def cut(values: int, pieces: int) -> list[tuple[int, int]]:
    """(first value, number of values) of each piece of `values`; the first is the longest, the last may be empty.

    Pieces begin at multiples of SHARD_MULTIPLE, so that kernels find them aligned.
    """
    length = -(-values // (pieces * SHARD_MULTIPLE)) * SHARD_MULTIPLE
    starts = [min(piece * length, values) for piece in range(pieces)]
    return [(start, min(length, values - start)) for start in starts]
