"""Launches of lsq.ops.fake_quantize."""

import torch

from lsq.native.geometry import THREADS, VECTOR, row_defines, warp_blocks
from lsq.native.launch import check, float_define, launch
from lsq.ops.fake_quantize import MULTIPLIED, FakeQuantize, FakeQuantizeGradient, RoundAtRandom
from lsq.ops.launches import zero
from lsq.ops.sums import PartialSums
from lsq.ops.sums_cuda import finish, parts_of
from lsq.program.cuda import launches, scratch_of


def _measured(op: FakeQuantize) -> tuple[int, int]:
    """Return how many largest magnitudes a GPU finds first: (of blocks, of their rows or of
    all)."""
    down, across = op.form.grain.grid((op.rows, op.columns))
    blocks, tops = 0 if op.given else down * across, 0
    if op.stored == MULTIPLIED and (op.each_row or op.clips != 1):
        tops = down if op.each_row else 1
    return blocks, tops


@scratch_of.register(FakeQuantize)
def scratch_of_fake_quantize(op: FakeQuantize):
    return [((count,), torch.float32) for count in _measured(op) if count and op.x.numel()]


@launches.register(FakeQuantize)
def launch_fake_quantize(op: FakeQuantize, *scratch):
    check(op.coded is None, "FakeQuantize makes codes on the CPU alone: leave `coded` out")
    count = op.x.numel()
    if count == 0:
        return []
    left, grid = iter(scratch), -(-count // (VECTOR * THREADS))
    found = [next(left) if wanted else None for wanted in _measured(op)]
    passes = [("lsq_fake_quantize", grid)]
    if scratch:
        of_clips = -(-op.clips // THREADS)
        passes.insert(0, ("lsq_largest_magnitudes", of_clips if op.given else grid))
    whole = int(op.columns % VECTOR == 0 and op.block_columns % VECTOR == 0)
    defines = {"WHOLE": whole, **float_define(op.x, op.out)}
    kernels = [
        launch("fake_quantize.cu", name, op, *found, grid=blocks, **defines)
        for name, blocks in passes
    ]
    return [*map(zero, scratch), *kernels]


@scratch_of.register(FakeQuantizeGradient)
def scratch_of_fake_quantize_gradient(op: FakeQuantizeGradient):
    return [parts_of(op.rows, op.columns, 1)]


@launches.register(FakeQuantizeGradient)
def launch_fake_quantize_gradient(op: FakeQuantizeGradient, partial):
    end = op.nonlinearity
    floats = (op.gradient, op.out, op.added, op.dx, None if end is None else end.before)
    slope = {} if end is None or end.before is None else {"ACTIVATION": int(end.activation)}
    entry = launch(
        "fake_quantize_gradient.cu",
        "lsq_fake_quantize_gradient",
        op,
        partial,
        grid=len(partial),
        **slope,
        **float_define(*floats),
        **row_defines(op.columns),
    )
    return [entry, *finish(PartialSums.of(partial, op.columns, (op.sum,), op.dclip))]


@launches.register(RoundAtRandom)
def launch_round_at_random(op: RoundAtRandom):
    return launch(
        "fake_quantize.cu",
        "lsq_round_values_at_random",
        op,
        grid=warp_blocks(op.rows),
        WHOLE=int(op.columns % VECTOR == 0),
        **float_define(op.x, op.out),
    )
