"""What every exchange should give, value by value: written for itself, in float64 where rounding is
not the point."""

import math

import numpy
import torch

from lsq.ops.lean_messages import LeanLayout, LeanMessages

f32 = numpy.float32


def rounded(values: numpy.ndarray, block: int = 128) -> numpy.ndarray:
    """Values float32 [n] after rounding to the nearest code, with a scale for each block."""
    out = numpy.empty_like(values)
    for start in range(0, len(values), block):
        part = values[start : start + block]
        if not numpy.isfinite(part).all():
            out[start : start + block] = math.nan
            continue
        magnitude = numpy.abs(part).max()
        if magnitude < 1e-35:
            out[start : start + block] = 0
            continue
        scale = upwards(magnitude / f32(127))
        out[start : start + block] = numpy.rint(part * (f32(1) / scale)) * scale
    return out


def upwards(scale: f32) -> f32:
    """The nearest float32 that is a bfloat16 and not smaller."""
    return f32(math.ldexp(math.ceil(math.ldexp(math.frexp(scale)[0], 8)), math.frexp(scale)[1] - 8))


def shards(values: numpy.ndarray, count: int) -> list[numpy.ndarray]:
    """Values [n] in `count` shards of one length, a multiple of 32, the rest filled up with
    zeros."""
    length = math.ceil(math.ceil(len(values) / count) / 32) * 32
    padded = numpy.zeros(count * length, f32)
    padded[: len(values)] = values
    return list(padded.reshape(count, length))


def in_order(rows) -> numpy.ndarray:
    total = rows[0].astype(f32)
    for row in rows[1:]:
        total = total + row.astype(f32)
    return total


def lean(values: numpy.ndarray, bits: float) -> numpy.ndarray:
    """A shard after rounding by the codec's reference, which tests/ops compares with float64."""
    layout = LeanLayout.for_values(len(values), 1, bits=bits)
    messages = LeanMessages(layout=layout, data=torch.empty(1, layout.message_bytes))
    data = messages.encode(torch.from_numpy(values)[None])
    return LeanMessages(layout=layout, data=data).decode()[0].numpy()


def two_hop(
    rows: list[numpy.ndarray], factor: float, first=rounded, second=rounded
) -> numpy.ndarray:
    """Of each worker's values [n]: the mean that all get; `first`, `second`: round in each hop."""
    cut = [shards(row, len(rows)) for row in rows]
    pieces = []
    for owner in range(len(rows)):
        total = in_order([first(mine[owner]) for mine in cut])
        pieces.append(second(total * f32(factor)))
    return numpy.concatenate(pieces)[: len(rows[0])]


def hierarchical(rows: list[numpy.ndarray], node_size: int, *rounding) -> numpy.ndarray:
    n, length = len(rows[0]), math.ceil(len(rows[0]) / (node_size * 32)) * 32
    nodes = [in_order(rows[first : first + node_size]) for first in range(0, len(rows), node_size)]
    pieces = []
    for start in range(0, node_size * length, length):
        pieces_of_nodes = [node[start : start + length] for node in nodes]
        mine = [numpy.pad(piece, (0, length - len(piece))) for piece in pieces_of_nodes]
        pieces.append(two_hop(mine, 1 / len(rows), *rounding))
    return numpy.concatenate(pieces)[:n]


def gcq(rows: list[numpy.ndarray]) -> numpy.ndarray:
    n, workers, row = len(rows[0]), len(rows), 1024
    padded = [numpy.pad(values.astype(f32), (0, -n % row)).reshape(-1, row) for values in rows]
    real = [min(row, n - first) for first in range(0, n, row)]
    kept = [max(1, math.ceil(round(values * (1 - 0.99), 6))) for values in real]
    clips = [
        numpy.sort(numpy.abs(values), axis=1)[range(len(kept)), [-k for k in kept]]
        for values in padded
    ]
    scale = (numpy.max(clips, axis=0) / f32(127))[:, None]
    levels = 127 // workers
    with numpy.errstate(divide="ignore", invalid="ignore"):
        codes = [
            numpy.rint(numpy.clip(numpy.nan_to_num(v / (scale * f32(workers))), -levels, levels))
            for v in padded
        ]
    return (numpy.sum(codes, axis=0).astype(f32) * scale).reshape(-1)[:n]
