"""Launches of lsq.ops.attention."""

import torch

from lsq.native.geometry import THREADS, VECTOR, row_defines
from lsq.native.launch import FLOATS, TICKET, check, float_define, launch
from lsq.ops.attention import Append, Attention, AttentionGradient, Heads
from lsq.ops.launches import started
from lsq.ops.sums import PartialSums
from lsq.ops.sums_cuda import KernelSums, finish, gradient_sums
from lsq.program.cuda import kernel_sums, launches, scratch_of
from lsq.program.operation import Spec

WIDEST = 128  # Most columns of a head.

TILE = 64  # Most queries or keys that a block takes at a time.


@launches.register(Attention)
def launch_attention(op: Attention):
    rows = tile_rows(op.heads)
    return launch(
        "attention.cu",
        "lsq_attention",
        op,
        TICKET,
        block=threads(rows),
        grid=_blocks(op.heads, op.heads.rows, rows, op.heads.count),
        **_defines(op.heads, rows, op.out),
        **started(op.rounded),
    )


@kernel_sums.register(AttentionGradient)
def sums_of_attention_gradient(op: AttentionGradient) -> list[KernelSums]:
    return [gradient_sums(end, rows, one.columns, one.rows.coded) for one, rows, end in op.sides]


@scratch_of.register(AttentionGradient)
def scratch_of_attention_gradient(op: AttentionGradient) -> list[Spec]:
    """Return memory for sums of each row's weighted probabilities; each tensor's gradient in
    the dtype of activations and its sums over rows; the blocks' parts of the gradient of biases."""
    found = [((op.heads.rows, op.heads.count), torch.float32)]
    found += [((rows, one.columns), op.dcontext.dtype) for one, rows, _ in op.sides]
    found += [spec for sums in kernel_sums(op) for spec in sums.scratch]
    return found if op.dbias is None else [*found, _bias_parts(op)]


def _bias_parts(op: AttentionGradient) -> Spec:
    heads = op.heads
    blocks, _ = _blocks(heads, heads.key_rows, tile_rows(heads, op.dcontext), 1)
    return (blocks, op.dbias.numel()), torch.float32


@launches.register(AttentionGradient)
def launch_attention_gradient(op: AttentionGradient, sums, *scratch):
    heads, sides = op.heads, len(op.sides)
    gradients, left = scratch[:sides], iter(scratch[sides:])
    of_biases = None if op.dbias is None else scratch[-1]
    dq, dkv = gradients[0], gradients[-1]
    rows = tile_rows(heads, op.dcontext)
    shared = shared_bytes(heads, rows, op.dcontext.dtype)
    defines = _defines(heads, rows, op.dcontext, *(end.floats for _, _, end in op.sides))

    def kernel(side: str, among: int, count: int, *arguments):
        return launch(
            "attention_gradient.cu",
            f"lsq_attention_{side}_gradient",
            *(op, sums, dq, *arguments),
            grid=_blocks(heads, among, rows, count),
            block=threads(rows),
            shared=shared,
            SHARED=shared,
            **defines,
        )

    entries = [
        kernel("query", heads.rows, heads.count),
        kernel("key", heads.key_rows, heads.key_count, dkv, of_biases),
    ]
    if of_biases is not None:
        entries += finish(PartialSums.of(of_biases, op.dbias.numel(), (op.dbias,)))
    ends = zip(op.sides, kernel_sums(op), gradients, strict=True)
    for keys, ((one, _, end), sums_over_rows, gradient) in enumerate(ends):
        partial = sums_over_rows.take(left)
        rounding = launch(  # to floats or codes, a row at a time
            "attention_rows.cu",
            "lsq_attention_gradient_rows",
            op,
            gradient,
            partial,
            grid=len(partial),
            KEYS=keys,
            ROUNDED=int(end.rounded is not None),
            FLOAT=FLOATS[op.dcontext.dtype],
            **row_defines(one.columns),
        )
        entries += [rounding, *sums_over_rows.finish(partial)]
    return entries


def _blocks(heads: Heads, rows: int, tile: int, count: int) -> tuple[int, int]:
    """Return the grid: blocks of rows (csrc/cuda/attention.cuh) and heads."""
    return rows // tile + heads.sentences + 1, count


def tile_rows(heads: Heads, *floats: torch.Tensor) -> int:
    """Return how many queries or keys a block takes at a time: as many as fit into shared memory.

    `floats`: activations that the kernel reads beside the heads.
    """
    check_width(heads.width)
    wide = any(one.dtype == torch.float32 for one in (*_floats(heads), *floats))
    return TILE // ((1 + (heads.width > 64)) * (1 + wide))


def check_width(width: int) -> None:
    check(
        width % VECTOR == 0 and 0 < width <= WIDEST,
        f"heads of {width} columns cannot run on CUDA: the width must be a multiple of {VECTOR}, up"
        f" to {WIDEST}",
    )


def threads(rows: int) -> int:
    """Return the threads of a block: a warp for 16 rows of its tile."""
    return 2 * rows


def shared_bytes(heads: Heads, rows: int, dtype: torch.dtype) -> int:
    """Return a gradient block's shared memory in bytes: tiles of queries, keys, values, their
    context's gradient in `dtype`, and two of pairs, as bfloat16 parts, with rows 16 bytes apart."""
    single = dtype == torch.float32
    of_float, of_pair = (3, 3) if single else (1, 2)
    operands = 3 * (of_float if _floats(heads) else 1) + of_float
    return rows * (operands * (-(-heads.width // 16) * 32 + 16) + 2 * of_pair * (2 * rows + 16))


def _floats(heads: Heads) -> list[torch.Tensor]:
    """Return queries, keys and values that are floats."""
    return [one.rows.floats for one in (heads.q, heads.k, heads.v) if one.rows.floats is not None]


def _defines(heads: Heads, tile: int, *floats: torch.Tensor | None) -> dict[str, int]:
    """Return the -D definitions of a kernel on tiles."""
    among = _floats(heads)
    check(
        len(among) in (0, 3),
        "queries, keys and values must all be codes, or all floats: round all three or none",
    )
    found = [one for one in (*among, *floats) if one is not None]
    defines = {"WIDTH": heads.width, "TILE": tile, "CODED": int(not among)}
    if heads.bias is not None:
        defines |= {"DISTANCES": heads.bias.distances, "BUCKETS": heads.bias.buckets}
    if heads.group > 1:
        defines["SHARING"] = heads.group
    return defines | (float_define(*found) if found else {})


WORD = 16  # Bytes that a thread of lsq_append copies at once, if rows are whole words.


@launches.register(Append)
def launch_append(op: Append):
    out = op.out_floats if op.before is None else op.out
    words = op.columns * out.dtype.itemsize % WORD == 0
    units = out.numel() * out.dtype.itemsize // (WORD if words else out.dtype.itemsize)
    floats = op.before_floats, op.now_floats, out
    defines = float_define(*floats) if op.before is None else {"CODES": 1}
    grid = max(1, -(-units // THREADS))
    return launch("elementwise.cu", "lsq_append", op, grid=grid, WORDS=int(words), **defines)
