"""int8: the mean of all workers' gradients in two hops of codes.

Each worker owns a shard of the bucket. First hop: every worker sends each owner its codes of the owner's shard
(all-to-all); the owner adds up the values in float32, in the order of ranks. Second hop: the owner rounds the mean
once more and sends its codes to all (all-gather). A value is rounded twice whatever the number of workers, and all end
with the same codes. Scales lie in the messages, beside the codes (Wang et al. 2023, ZeRO++, section 3.3; there only the
first hop is rounded).
"""

from torch import Tensor
from torch.distributed import ProcessGroup

from lsq.dist.codec import Codec
from lsq.dist.collectives import all_gather, all_to_all
from lsq.dist.scratch import Scratch
from lsq.ops.gradient_layout import MessageLayout


class TwoHop:
    """Averages buckets over a group; see the module.

    Args:
        group: the workers, in order of ranks.
        codec: rounds and packs.
        scratch: holds the messages.
    """

    def __init__(self, group: ProcessGroup, codec: Codec, scratch: Scratch):
        self.group, self.codec, self.scratch = group, codec, scratch

    def average(self, buffer: Tensor, error: Tensor | None = None) -> None:
        """Replace `buffer`, float [n], by its mean over the group.

        Args:
            error: float32 [n], gets what rounding took from this worker's values; None: not wanted.
        """
        workers = self.group.size()
        layout = self.codec.first_layout(buffer.numel(), workers)
        sent = self.scratch.take("sent", (workers, layout.message_bytes))
        self.codec.pack(buffer.view(1, -1), layout, sent, error)
        received = exchange_mean(sent, layout, self.group, self.codec, self.scratch, 1 / workers)
        self.codec.unpack(received, layout, buffer)


def exchange_mean(
    sent: Tensor, layout: MessageLayout, group: ProcessGroup, codec: Codec, scratch: Scratch, factor: float
) -> Tensor:
    """Both hops: from what each worker packed to the messages of the result, the same on all workers.

    Args:
        sent: uint8 [S, M], a message for each of the S workers of `group`.
        layout: of these messages, on the first hop.
        factor: what sums are multiplied by.

    Returns:
        uint8 [S, M'], a message of every shard in the layout of the second hop; scratch memory.
    """
    received = scratch.take("received", tuple(sent.shape))
    all_to_all(received, sent, group)
    shape = (layout.shards, codec.second_layout(layout).message_bytes)
    own = scratch.take("own", shape[1:])
    codec.sum(received, layout, own, factor)
    result = scratch.take("result", shape)
    all_gather(result, own, group)
    return result
