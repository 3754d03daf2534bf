"""Launches of lsq.ops.rounding."""

from lsq.native.geometry import THREADS, VECTOR, row_defines, tiles, warp_blocks
from lsq.native.launch import TICKET, Launch, float_define, launch
from lsq.ops.launches import check_columns, started, transpose_codes
from lsq.ops.rounding import Add, Round, RoundGradient, RoundWeight, UnpackWeight
from lsq.ops.sums import PartialSums
from lsq.ops.sums_cuda import KernelSums, parts_of
from lsq.program.cuda import kernel_sums, launches
from lsq.quant.formats import GROUP

VECTORS = 4  # Vectors of 8 values that a thread of lsq_round rounds.

WIDEST_TOGETHER = 8192  # Most columns of a pass that both rounds and sums.


@launches.register(Round)
def launch_round(op: Round):
    check_columns(VECTOR, **{"the width of what is rounded": op.x.shape[1]})
    return launch(
        "rounding.cu",
        "lsq_round",
        op,
        TICKET,
        grid=max(1, -(-op.count // (VECTORS * VECTOR * THREADS))),
        **float_define(op.x),
        **started(op.rounded),
    )


@launches.register(RoundWeight)
def launch_round_weight(op: RoundWeight):
    form, grid = op.weight.format, warp_blocks(op.rows)
    if op.weight.in_out:
        return _round_in_out(op)
    check_columns(16, **{"the width of a weight": op.columns})
    if form.packed:
        return launch(f"{form.name}.cu", f"lsq_round_{form.name}", op, TICKET, grid=grid)
    entries = [launch("rounding_weight.cu", "lsq_round_weight", op, TICKET, grid=grid)]
    if op.weight.transposed is not None:
        entries.append(transpose_codes(op.weight.codes, op.weight.transposed))
    return entries


@launches.register(UnpackWeight)
def launch_unpack_weight(op: UnpackWeight):
    name, groups = op.weight.format.name, op.rows * -(-op.columns // GROUP)
    check_columns(16, **{"the width of a weight": op.columns, "its padded number of rows": op.rows})
    return launch(f"{name}.cu", f"lsq_unpack_{name}", op, grid=max(1, -(-groups // THREADS)))


@kernel_sums.register(RoundGradient)
def sums_of_round_gradient(op: RoundGradient) -> list[KernelSums]:
    def of(parts) -> PartialSums:
        return PartialSums.of(parts, op.columns, (op.sum,))

    return [KernelSums(op, parts_of(op.rows, op.columns), of, ("sum",))]


@launches.register(RoundGradient)
def launch_round_gradient(op: RoundGradient, *scratch):
    (over_rows,) = kernel_sums(op)
    parts = over_rows.take(iter(scratch))
    rounds, sums = op.rounded is not None, op.parts is not None or op.sum is not None
    apart = rounds and sums and op.columns > WIDEST_TOGETHER
    passes = [(True, False), (False, True)] if apart else [(rounds, sums)]
    return [*(_pass(op, parts, *each) for each in passes), *over_rows.finish(parts)]


def _pass(op: RoundGradient, parts, rounds: bool, sums: bool):
    return launch(
        "rounding_gradient.cu",
        "lsq_round_gradient",
        op,
        parts if sums else None,
        grid=len(parts),
        ROUNDED=int(rounds),
        SUMMED=int(sums),
        **float_define(op.gradient),
        **row_defines(op.columns),
    )


@launches.register(Add)
def launch_add(op: Add):
    grid = max(1, -(-op.count // (VECTOR * THREADS)))
    return launch("elementwise.cu", "lsq_add", op, grid=grid, **float_define(op.a, op.b, op.out))


def _round_in_out(op: RoundWeight) -> list[Launch]:
    """Return the launches that write codes in both layouts, and scales."""
    inputs, rows = op.columns, op.rows
    check_columns(16, **{"the width of a weight": inputs, "the outputs of a weight": op.valid})
    check_columns(16, **{"the rows of its codes": rows})
    source = "rounding_weight_in_out.cu"
    return [
        launch(source, "lsq_begin_weight_in_out", op, grid=-(-rows // THREADS)),
        launch(source, "lsq_round_weight_in_out", op, grid=tiles(inputs, rows)),
    ]
