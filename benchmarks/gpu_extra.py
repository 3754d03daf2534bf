"""Operations that no program of a layer has: the optimizer's step, and a gradient in two layouts."""

from collections.abc import Iterator

import torch

from lsq.csrc.geometry import padded
from lsq.ops import registry
from lsq.program.tensor import Operation, VirtualTensor

ACTIVATIONS = torch.bfloat16


def operations(tokens: int, hidden: int, feed_forward: int) -> Iterator[Operation]:
    """A step of Adam on the weight [F, H] of a feed-forward block, and the gradient [M, F] of its product."""
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


def _tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> VirtualTensor:
    return VirtualTensor(name=name, shape=tuple(shape), dtype=dtype)


def _operation(name: str, inputs: tuple, outputs: tuple, **attributes) -> Operation:
    return Operation(definition=registry.definition(name), inputs=inputs, outputs=outputs, attributes=attributes)
