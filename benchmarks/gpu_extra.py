"""Operations that no program of a layer has: the optimizer's step, a gradient in two layouts, gradients as messages."""

from collections.abc import Iterator

import torch

from lsq.csrc.geometry import padded
from lsq.ops import registry
from lsq.ops.gradient_layout import MessageLayout
from lsq.program.tensor import Operation, VirtualTensor

ACTIVATIONS = torch.bfloat16
PROCESSES = 8
"""That exchange messages."""


def operations(tokens: int, hidden: int, feed_forward: int) -> Iterator[Operation]:
    """A step of Adam on the weight [F, H] of a feed-forward block, the gradient [M, F] of its product, and messages."""
    shape = (feed_forward, hidden)
    state = [_tensor(name, shape) for name in ("weight", "d_weight", "first_moment", "second_moment")]
    inputs = (*state, _tensor("numbers", (6,)), _tensor("weight_clip", shape[:1]))
    codes = [_tensor("codes", shape, torch.int8), _tensor("codes_transposed", shape[::-1], torch.int8)]
    outputs = (*(_tensor(f"new_{tensor.name}", shape) for tensor in (state[0], *state[2:])), *codes)
    yield _operation("adam", inputs, (*outputs, _tensor("scale", shape[:1])))

    x = _tensor("d_product", (tokens, feed_forward), ACTIVATIONS)
    key = _tensor("random_key", (1,), torch.int64)
    rows = [_tensor("d_product.codes", x.shape, torch.int8), _tensor("d_product.row_scale", (tokens,))]
    turned = _tensor("d_product.transposed", (feed_forward, padded(tokens)), torch.int8)
    factor = _tensor("weight_scale", (feed_forward,))
    yield _operation("quantize_transpose", (x, factor, key), (*rows, turned, None), shared_scale=True)

    for dtype in (torch.float32, torch.bfloat16):
        yield from messages(feed_forward * hidden, dtype)


def messages(values: int, dtype: torch.dtype) -> Iterator[Operation]:
    """What a process does with a bucket of gradients: pack it, add up one shard of every process's, unpack the sums."""
    layout = MessageLayout.for_values(values, PROCESSES)
    cut = {"length": layout.length}
    x, unpacked = _tensor("d_bucket", (1, values), dtype), _tensor("d_unpacked", (values,), dtype)
    packed = _tensor("messages", (PROCESSES, layout.message_bytes), torch.uint8)
    yield _operation("gradient_pack", (x, None), (packed, None), shards=PROCESSES, **cut)
    if dtype == torch.float32:
        error = _tensor("error", (values,))
        yield _operation("gradient_pack", (x, None), (packed, error), shards=PROCESSES, error=True, **cut)
        total = _tensor("message", packed.shape[1:], torch.uint8)
        yield _operation("gradient_sum", (packed, None), (total,), factor=1 / PROCESSES, **cut)
    sums = _tensor("messages", (1, *packed.shape), torch.uint8)
    yield _operation("gradient_unpack", (sums,), (unpacked,), values=values, dtype=dtype, **cut)


def _tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> VirtualTensor:
    return VirtualTensor(name=name, shape=tuple(shape), dtype=dtype)


def _operation(name: str, inputs: tuple, outputs: tuple, **attributes) -> Operation:
    return Operation(definition=registry.definition(name), inputs=inputs, outputs=outputs, attributes=attributes)
