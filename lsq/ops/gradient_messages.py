"""gradient_pack, gradient_sum, gradient_unpack: gradients as messages of 8 or 4 bits a value, their sums, and back.

What a quantised all-reduce does between its collectives. MessageLayout (gradient_layout.py) says how a message lies in
memory. A block's largest magnitude gives its scale, as rounding.gradient_scale has it: 0 where it vanishes, NaN where a
value is not finite, so that overflow reaches everyone. It is rounded up to a bfloat16: blocks half as long, for the
bytes of a float32, lose less. Sums are float32 sums in order of the products code * scale,
each rounded before it is added: all devices and all processes compute the same bits.

v values, S shards, L values of a shard, M bytes of a message, N messages, R rows or copies that are added up.
"""

import torch

from lsq.csrc import loader
from lsq.csrc.geometry import THREADS, VECTOR
from lsq.csrc.launch import FLOATS, check, float_define, launch
from lsq.ops import rounding
from lsq.ops.gradient_layout import MessageLayout
from lsq.ops.random import uniform
from lsq.ops.registry import OpDefinition, register

WARP = 32
LARGEST_GRID = 65535
"""Blocks of threads in the second dimension of a grid."""


def pack_reference(x, key, *, shards, length, bits=8, block=128, stochastic=False, stream=0, error=False):
    """x float [R, v], key int64 [1] or None -> messages uint8 [S, M], error float32 [v] or None.

    Args:
        shards: S.
        length: L.
        bits: width of a code, 8 or 4.
        block: values that share a scale.
        stochastic: round up with a probability equal to the fraction, instead of to the nearest code, half to even.
        stream: of the random numbers; value i draws element i.
        error: whether value - code * scale is wanted; it is 0 in blocks that are not finite, and may be written over
            x float32 [1, v].

    Raises:
        ValueError: the shards do not hold v values, or there is no key to round at random with.
    """
    layout = pack_layout(x, shards, length, bits, block)
    check_key(key, stochastic)
    values = _sum_in_order(x.unbind(0))
    values = torch.nn.functional.pad(values, (0, shards * length - layout.values)).view(shards, length)
    messages, rest = _encode(values, layout, key if stochastic else None, stream)
    return messages, rest.flatten()[: layout.values].clone() if error else None


def pack_cpu(
    x, key, messages, error_out, *, shards, length, bits=8, block=128, stochastic=False, stream=0, error=False
):
    layout = pack_layout(x, shards, length, bits, block)
    check_key(key, stochastic)
    loader.call(
        "lsq_gradient_pack", x, FLOATS[x.dtype], key if stochastic else None, messages, error_out, x.shape[0],
        layout.values, shards, length, block, bits, stream,
    )


def pack_cuda(
    x, key, messages, error_out, *, shards, length, bits=8, block=128, stochastic=False, stream=0, error=False
):
    layout = pack_layout(x, shards, length, bits, block)
    check_key(key, stochastic)
    return [
        launch(
            "gradient_messages.cu", "lsq_gradient_pack", x, key if stochastic else None, messages, error_out,
            x.shape[0], layout.values, length, stream, grid=_grid(layout, _vectors(block)), BLOCK=block, OUT_BITS=bits,
            RANDOM=int(stochastic), MANY=int(x.shape[0] > 1), **float_define(x),
        )
    ]


def sum_reference(messages, key, *, length, bits=8, out_bits=8, block=128, stochastic=False, stream=0, factor=1.0):
    """messages uint8 [N, M], key int64 [1] or None -> message uint8 [M']: their sum times `factor`, rounded anew.

    Args:
        length: L.
        bits: width of the messages' codes.
        out_bits: width of the result's codes.
        block: values that share a scale, before and after.
        stochastic: see gradient_pack; value i of the shard draws element i.
        stream: of the random numbers.
        factor: float32.

    Raises:
        ValueError: the messages have another size, or there is no key to round at random with.
    """
    layout, out_layout = sum_layouts(messages, length, bits, out_bits, block)
    check_key(key, stochastic)
    values = _sum_in_order(decode(message, layout) for message in messages) * factor
    return (_encode(values[None], out_layout, key if stochastic else None, stream)[0][0],)


def sum_cpu(messages, key, out, *, length, bits=8, out_bits=8, block=128, stochastic=False, stream=0, factor=1.0):
    sum_layouts(messages, length, bits, out_bits, block)
    check_key(key, stochastic)
    loader.call(
        "lsq_gradient_sum", messages, key if stochastic else None, out, messages.shape[0], length, block, bits,
        out_bits, stream, float(factor),
    )


def sum_cuda(messages, key, out, *, length, bits=8, out_bits=8, block=128, stochastic=False, stream=0, factor=1.0):
    layout, _ = sum_layouts(messages, length, bits, out_bits, block)
    check_key(key, stochastic)
    return [
        launch(
            "gradient_messages.cu", "lsq_gradient_sum", messages, key if stochastic else None, out, messages.shape[0],
            length, stream, float(factor), grid=_grid(layout, _vectors(block)), BLOCK=block, BITS=bits,
            OUT_BITS=out_bits, RANDOM=int(stochastic),
        )
    ]


def unpack_reference(messages, *, values, length, bits=8, block=128, factor=1.0, dtype=torch.float32):
    """messages uint8 [R, S, M] -> x [v]: the sum of the R copies times `factor`, rounded once.

    Args:
        values: v.
        length: L.
        bits: width of the codes.
        block: values that share a scale.
        factor: float32.
        dtype: of x: float32, bfloat16 or float16.

    Raises:
        ValueError: the messages have another size, or do not hold v values.
    """
    layout = unpack_layout(messages, values, length, bits, block)
    x = _sum_in_order(decode(copy, layout) for copy in messages) * factor
    return (x.flatten()[:values].to(dtype),)


def unpack_cpu(messages, x, *, values, length, bits=8, block=128, factor=1.0, dtype=torch.float32):
    layout = unpack_layout(messages, values, length, bits, block)
    loader.call(
        "lsq_gradient_unpack", messages, x, FLOATS[x.dtype], messages.shape[0], values, layout.shards, length, block,
        bits, float(factor),
    )


def unpack_cuda(messages, x, *, values, length, bits=8, block=128, factor=1.0, dtype=torch.float32):
    layout = unpack_layout(messages, values, length, bits, block)
    return [
        launch(
            "gradient_messages.cu", "lsq_gradient_unpack", messages, x, messages.shape[0], values, length,
            float(factor), grid=_grid(layout, 1), BLOCK=block, BITS=bits, MANY=int(messages.shape[0] > 1),
            **float_define(x),
        )
    ]


def decode(messages: torch.Tensor, layout: MessageLayout) -> torch.Tensor:
    """The values float32 [..., L] of messages uint8 [..., M]."""
    codes = layout.codes(messages)
    if layout.bits == 4:
        # A shift to the left drops what stands in the high half; one to the right keeps the sign.
        codes = torch.stack([codes.bitwise_left_shift(4) >> 4, codes >> 4], dim=-1).flatten(-2)
    return codes.to(torch.float32) * _per_value(layout.scales(messages).to(torch.float32), layout)


def message_scale(largest: torch.Tensor, code: int) -> tuple[torch.Tensor, torch.Tensor]:
    """rounding.gradient_scale with the scale rounded up to a bfloat16 (in float32), so that no value exceeds `code`."""
    scale, reciprocal = rounding.gradient_scale(largest, code)
    upwards = ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    plain = reciprocal != 0
    return torch.where(plain, upwards, scale), torch.where(plain, torch.ones_like(scale) / upwards, 0.0)


def pack_layout(x, shards: int, length: int, bits: int, block: int) -> MessageLayout:
    """Of the messages of x [R, v]; raises a ValueError where they do not hold it."""
    check(
        x.dim() == 2 and x.shape[0] > 0,
        f"gradient_pack was given values of shape {list(x.shape)}; it takes [R, v], with at least one row: add a "
        "dimension with x[None]",
    )
    return MessageLayout(values=x.shape[1], shards=shards, length=length, block=block, bits=bits)


def sum_layouts(messages, length: int, bits: int, out_bits: int, block: int) -> tuple[MessageLayout, MessageLayout]:
    """Of the messages [N, M] and of their sum [M']; raises a ValueError where the messages have another size."""
    layout = MessageLayout.of_shard(length, block=block, bits=bits)
    _check_messages("gradient_sum", messages, layout, "[N, M]", 2)
    return layout, MessageLayout.of_shard(length, block=block, bits=out_bits)


def unpack_layout(messages, values: int, length: int, bits: int, block: int) -> MessageLayout:
    """Of messages [R, S, M]; raises a ValueError where they have another size or do not hold the values."""
    shards = messages.shape[1] if messages.dim() == 3 else 1
    layout = MessageLayout(values=values, shards=shards, length=length, block=block, bits=bits)
    _check_messages("gradient_unpack", messages, layout, "[R, S, M]", 3)
    return layout


def check_key(key: torch.Tensor | None, stochastic: bool) -> None:
    """Refuse to round at random without a key."""
    check(
        key is not None or not stochastic,
        "stochastic rounding was asked for without a random key; give one (lsq.ops.random.draw_key) or round to the "
        "nearest code",
    )


def _check_messages(name: str, messages, layout: MessageLayout, shape: str, dimensions: int) -> None:
    check(
        messages.dtype == torch.uint8 and messages.dim() == dimensions and messages.shape[0] > 0
        and messages.shape[-1] == layout.message_bytes,
        f"{name} was given messages of {messages.dtype} {list(messages.shape)}; for shards of {layout.length} values "
        f"in {layout.bits} bits and blocks of {layout.block}, it takes torch.uint8 {shape} with M = "
        f"{layout.message_bytes}, at least one",
    )


def _vectors(block: int) -> int:
    """Vectors of a thread where up to 32 threads share a block of values."""
    return max(1, block // (WARP * VECTOR))


def _grid(layout: MessageLayout, vectors: int) -> tuple[int, int]:
    """Blocks of threads for a shard, and shards, where a thread takes `vectors` vectors."""
    check(
        layout.shards <= LARGEST_GRID,
        f"{layout.shards} shards cannot be launched at once on CUDA; choose at most {LARGEST_GRID}",
    )
    return -(-layout.length // (THREADS * VECTOR * vectors)), layout.shards


def _sum_in_order(terms) -> torch.Tensor:
    total = None
    for term in terms:
        total = term.to(torch.float32) if total is None else total + term.to(torch.float32)
    return total


def _per_value(of_blocks: torch.Tensor, layout: MessageLayout) -> torch.Tensor:
    """[..., B] -> [..., L]."""
    return of_blocks.repeat_interleave(layout.block, dim=-1)[..., : layout.length]


def _encode(values: torch.Tensor, layout: MessageLayout, key: torch.Tensor | None, stream: int):
    """values float32 [S, L] -> messages uint8 [S, M], error float32 [S, L]; rounded at random where there is a key."""
    shards, length = values.shape
    whole = torch.nn.functional.pad(values, (0, layout.blocks * layout.block - length))
    largest = whole.view(shards, layout.blocks, layout.block).abs().amax(dim=-1)
    scale, reciprocal = message_scale(largest, layout.largest_code)
    scaled = values * _per_value(reciprocal, layout)
    if key is None:
        rounded = scaled.round()
    else:
        rounded = (scaled + uniform(key, stream, (shards, length)).to(values.device)).floor()
    codes = rounded.clamp(-layout.largest_code, layout.largest_code).nan_to_num(nan=0.0).to(torch.int8)
    scales = _per_value(scale, layout)
    error = torch.where(scales.isfinite(), values - codes.to(torch.float32) * scales, 0.0)
    if layout.bits == 4:
        codes = (codes[:, 0::2] & 15) | codes[:, 1::2].bitwise_left_shift(4)
    messages = torch.zeros(shards, layout.message_bytes, dtype=torch.uint8, device=values.device)
    layout.codes(messages).copy_(codes)
    # Bits, not values: PyTorch has several NaNs in bfloat16.
    layout.scales(messages).view(torch.int16).copy_(scale.view(torch.int32) >> 16)
    return messages, error


PACK = register(OpDefinition(name="gradient_pack", reference=pack_reference, cpu=pack_cpu, cuda=pack_cuda))
SUM = register(OpDefinition(name="gradient_sum", reference=sum_reference, cpu=sum_cpu, cuda=sum_cuda))
UNPACK = register(
    OpDefinition(name="gradient_unpack", reference=unpack_reference, cpu=unpack_cpu, cuda=unpack_cuda)
)
