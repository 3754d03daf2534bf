"""A decoded weight as the CPU multiplies it while it stays as it is: int8 codes with scales of
groups, packed.

N rows, K inputs, G groups along K.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from lsq.native import loader, tiles
from lsq.ops.fake_quantize import decode_weight
from lsq.ops.grouped_product import GroupedCodes, GroupedProduct, aligned
from lsq.program.operation import Operation
from lsq.program.values import Weight


def pack_weight(weight: Weight, run: Callable[[Operation], None]) -> None:
    """Write weight.grouped, of values and clip, on the CPU; `run` runs an operation there."""
    rows, columns = shape = weight.values_by_rows.shape
    encoding = decode_weight(
        dataclasses.replace(weight, decoded=torch.empty(shape, dtype=torch.float32))
    )
    codes = torch.empty(shape, dtype=torch.int8)
    scale = torch.empty(rows, weight.format.grain.grid(shape)[1], dtype=torch.float32)
    encoding.coded = GroupedCodes(codes=codes, scale=scale, group=weight.group)
    run(encoding)
    nothing = GroupedCodes(
        codes=codes[:0], scale=torch.empty(1, 1, dtype=torch.float32), group=weight.group
    )
    product = GroupedProduct(
        a=nothing, b=encoding.coded, out=torch.empty(0, rows, dtype=torch.float32)
    )
    if columns:
        loader.call("lsq_pack_grouped", product, aligned(weight.grouped))


def unpacked_values(weight: Weight) -> torch.Tensor:
    """Reference: the values float32 [N, K] of weight.grouped."""
    (rows, columns), group, pair = weight.shape, weight.group, tiles.PAIR
    pairs, groups = -(-rows // pair), -(-columns // group)
    blocks = aligned(weight.grouped)[: pairs * groups * pair * (group + 8)].view(pairs, groups, -1)
    codes = (
        blocks[..., : pair * group]
        .view(torch.int8)
        .reshape(pairs, groups, 2, group // 4, pair // 2, 4)
    )
    codes = codes.permute(0, 2, 4, 1, 3, 5).reshape(pairs * pair, -1)[:rows, :columns]
    scale = blocks[..., pair * (group + 4) :].contiguous().view(torch.float32)
    scale = scale.permute(0, 2, 1).reshape(-1, groups)[:rows]
    return GroupedCodes(codes=codes, scale=scale, group=group).decode()
