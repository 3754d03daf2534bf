"""Positions in self-attention: rotation of queries and keys, and biases by distance."""

import math
from functools import lru_cache

import torch

from lsq.config import LayerConfig, RelativeBias, Rotary
from lsq.layers.builder import LayerBuilder, Result
from lsq.ops.attention import PositionBias
from lsq.ops.rotation import HeadNorms, Rotate, Rotation, rotation_table
from lsq.program.tensor import Kind, VirtualTensor


def rotate_heads(
    builder: LayerBuilder, config: LayerConfig, x: VirtualTensor, result: Result, prefix: str
) -> None:
    """Rotate queries and keys of x [M, ...] into `result`; `qk_norm` normalises them before."""
    rows, width, norms = x.shape[0], config.head_columns, None
    if config.qk_norm is not None:
        query, key = (
            builder.parameter(f"{prefix}{part}_norm.weight", (width,), Kind.NORM_WEIGHT, start=1.0)
            for part in ("query", "key")
        )
        rstd = builder.tensor(prefix + "heads.rstd", (rows, config.heads + config.of_keys))
        norms = HeadNorms(query=query, key=key, rstd=rstd, epsilon=config.qk_norm)
    rotation = Rotation(
        table=builder.input("rotation", (config.rotary.positions, config.rotary.columns(width))),
        positions=builder.input("positions", (rows,), torch.int64),
        width=width,
        queries=config.heads,
        keys=config.of_keys,
    )
    builder.add(Rotate(x=x, rotation=rotation, norms=norms, out=result.out, rounded=result.rounded))


def position_bias(builder: LayerBuilder, config: LayerConfig, prefix: str) -> PositionBias | None:
    """Declare the biases of self-attention, if it has any, with inputs of `position_inputs`."""
    relative = config.relative_bias
    if relative is None:
        return None
    size = (relative.buckets, config.heads)
    if relative.shared:
        table = builder.input("relative_bias", size)
    else:
        table = builder.parameter(
            prefix + "relative_bias", size, Kind.TABLE, deviation=config.hidden**-0.5
        )
    return PositionBias(
        table=table, bucket=builder.input("buckets", (2 * relative.farthest + 1,), torch.int64)
    )


def position_inputs(
    config: LayerConfig,
    positions: torch.Tensor,
    longest: int,
    causal: bool,
    table: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return the inputs for positions of a program with self-attention, by name.

    `positions`: int64 [M], of the rows in their sentences, below `longest`. `table`: [buckets,
    heads], biases that several layers share. Raises ValueError if a sentence is longer than
    `rotary` allows, or the table is missing.
    """
    rotary, relative, found = config.rotary, config.relative_bias, {}
    if relative is not None:
        found = {"buckets": _buckets(relative, causal, positions.device)}
        if relative.shared:
            if table is None:
                raise ValueError(
                    "relative_bias has shared=True, but this layer is given no table; leave"
                    " `shared` out"
                )
            found["relative_bias"] = table
    if rotary is None:
        return found
    if longest > rotary.positions:
        raise ValueError(
            f"a sentence of {longest} words is longer than {rotary.positions}, the positions of"
            " Rotary; shorten it, or give Rotary more positions"
        )
    return found | {
        "positions": positions,
        "rotation": _table(rotary, config.head_columns, positions.device),
    }


@lru_cache(maxsize=16)
def _table(rotary: Rotary, head_columns: int, device: torch.device) -> torch.Tensor:
    rotated = rotary.columns(head_columns)
    with torch.inference_mode(False), torch.device("cpu"):  # cached, and training may use it
        exponents = -torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
        return rotation_table(rotary.base**exponents, rotary.positions).to(device)


@lru_cache(maxsize=16)
def _buckets(relative: RelativeBias, causal: bool, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), torch.device("cpu"):
        return bucket_of_distances(relative, causal).to(device)


def bucket_of_distances(relative: RelativeBias, causal: bool) -> torch.Tensor:
    """Return T5's buckets of keys, from L = `farthest` before a query to L behind: [2L + 1]."""
    distance = torch.arange(-relative.farthest, relative.farthest + 1)
    buckets = relative.buckets if causal else relative.buckets // 2
    behind = torch.zeros_like(distance) if causal else torch.where(distance > 0, buckets, 0)
    far = (-distance).clamp(min=0) if causal else distance.abs()
    exact = buckets // 2
    growth = torch.log(far.clamp(min=1).float() / exact) / math.log(relative.farthest / exact)
    ranges = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    return behind + torch.where(far < exact, far, ranges)
