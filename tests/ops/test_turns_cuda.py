"""Every kernel with three turns of each of its loops, on grids of two blocks where blocks stride.

From the second turn on a loop finds what the one before left in shared memory and registers; the
third reads what the second left. In the emulator, turns are counted.
"""

import math
from collections import defaultdict

import pytest
import torch

from lsq import gemm
from lsq.emulator import build
from lsq.native import geometry
from lsq.ops import embedding_cuda, weight_gradient_cuda
from lsq.ops.launches import add_sums, zero
from lsq.ops.nonlinearity import Activation
from lsq.ops.rounding import Round
from lsq.ops.sums import FinishSums, PartialSums
from tests.ops import (
    cuda,
    test_bit_product,
    test_borders,
    test_cached_attention,
    test_calibration,
    test_coarsen,
    test_compact_adam,
    test_fake_quantize,
    test_input_gradient,
    test_project_fields_cuda,
    test_rounding,
    test_sparse_project_cuda,
    test_weight_gradient,
)
from tests.ops import test_product_kernels_cuda as products
from tests.ops.compare import empty, on_cpu, on_reference, to_round
from tests.ops.cuda import compare_cuda
from tests.ops.gradient_checks import add_up, assert_same_bits, gradients, pack, packed, unpack
from tests.ops.test_adam import codes_of, numbers, state, step
from tests.ops.test_adapter import adapt_with_end, adapter_input, adapter_input_gradient
from tests.ops.test_aggregate import aggregate, aggregate_gradient, graph
from tests.ops.test_attention import append_of, compare_both
from tests.ops.test_embedding import embed, embed_gradient
from tests.ops.test_gated import gated, gated_by_row, gated_gradient
from tests.ops.test_kept_gradient import input_gradient
from tests.ops.test_kept_gradient import losses as losses_of_others
from tests.ops.test_kept_gradient import weight_gradient as kept_weight_gradient
from tests.ops.test_project import rounded_project
from tests.ops.test_residual_norm import compare_gradients, norm, norm_gradient, rms
from tests.ops.test_rotation import gradient_of as gradient_of_rotation
from tests.ops.test_rotation import rotate
from tests.ops.test_rounding import weight_of
from tests.ops.test_sums import scales
from tests.ops.test_vocabulary_loss import gradient_of, of_floats, operands
from tests.ops.turns import EXPORT, CountedKernels
from tests.optim import test_updates_cuda
from tests.quant import test_int4

BLOCKS, TURNS = 2, 3
FEW, WIDE = (41, 48), (11, 1040)
"""Rows and columns with three turns of two blocks: of rows in a warp, and in four."""


def adam_steps():
    compare_cuda(step(state(1027), numbers()))
    for clips in (1, 528):
        before = state(528, 272)
        before[1][[3, 20, 35, 36, 40, 527], [0, 127, 128, 131, 256, 271]] = math.nan
        codes = codes_of(torch.ones(clips), (528, 272))
        compare_cuda(step(before, numbers(), codes, transposed=True))
    codes = codes_of(torch.ones(528), (528, 272))
    compare_cuda(step(state(528, 272), numbers(), codes, transposed=True, largest=True))
    test_updates_cuda.turns()


def messages():
    layout, copies = packed(600, 17)
    one = copies[:, 0].contiguous()
    for operation in (
        pack(gradients(9, 600), layout),
        add_up(one, layout, factor=1 / 17),
        unpack(copies, layout, factor=0.7),
    ):
        for order in cuda.ORDERS:
            assert_same_bits(cuda.run(operation, order=order), on_reference(operation))


def nan_in_each_turn(x):
    """Copies of x [M, N] with a NaN in the first turn of a block, the second, the last."""
    for row in (0, x.shape[0] // 2, x.shape[0] - 1):
        poisoned = x.clone()
        poisoned[row, 5] = math.nan
        yield poisoned


def embeddings():
    """Three tiles of occurrences for each split, three splits, and words over many windows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding_cuda, "SPLITS", 3)
        for rows, columns in (FEW, WIDE, (1821, 48)):
            forward = compare_cuda(embed(rows, columns, 0.1))
            places = forward.tokens, forward.positions
            compare_cuda(embed_gradient(torch.randn(rows, columns), *places, 0.1))
            kept = on_cpu(losses_of_others(rows, 33, 48, inner=columns))
            compare_cuda(kept_weight_gradient(kept))


def targets():
    for rows, columns in (FEW, WIDE):
        compare_cuda(input_gradient(on_cpu(losses_of_others(rows, 33, 48, inner=columns))))


def norms():
    for rows, columns in (FEW, WIDE, (5, 2064)):
        z, update = torch.randn(rows, columns), torch.randn(rows, columns)
        for given in (z, *nan_in_each_turn(z)):
            compare_cuda(norm(given, rounds=True, error=True))
            compare_cuda(rms(given, rounds=True, error=True))
        compare_cuda(norm(z, update, kind=None, dropout=0.1))
        compare_gradients(torch.float32, rows, columns, rounds=True)
        compare_cuda(norm_gradient(on_cpu(rms(z, update, dropout=0.1)), rounds=True))
    compare_cuda(norm_gradient(on_cpu(norm(torch.randn(WIDE)))))


def losses():
    for rows, vocabulary in ((3, 8200), (3, 33)):
        found = compare_cuda(of_floats(*operands(rows, vocabulary)))
        compare_cuda(gradient_of(found))


def float_operands():
    x, weight, target = operands(7, 33)
    compare_cuda(of_floats(x, weight.bfloat16().float(), target), torch.bfloat16)
    target = cuda.current_device()
    out = torch.ones(4099, device=target.torch_device)
    target.run([zero(out)])
    assert not out.any()
    sums = torch.arange(4104, dtype=torch.int32).to(target.torch_device)
    total = torch.ones(4104, device=target.torch_device)
    target.run([add_sums(sums, total, adds=True)])
    assert torch.equal(total, sums + 1.0)


def transposition():
    """Runs of 114 rows, 32 at a time; largest magnitudes of 16 runs, 2 at a time."""
    for tile in (128, 16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weight_gradient_cuda, "TILE", tile)
            compare_cuda(test_weight_gradient.case(341))
    test_input_gradient.turns(*FEW, True)


def sums():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "strided", lambda turns, most: min(most, turns))
        compare_gradients(torch.float32, 341, 48, rounds=True)
    partial = PartialSums.of(torch.randn(1000, 4), 0, (), empty(1), clip_parts=4)
    compare_cuda(FinishSums(sums=[partial]))


def attentions():
    """Three tiles of a sentence, three steps of the search for a tile's sentence, three tiles of
    queries that see one of keys, three heads of queries that share keys."""
    for width, others in (
        (8, None),
        (64, (40, 0, 9, 140, 2)),
        (48, (1, 0, 20, 2, 3)),
        (128, (4, 0, 140, 2, 3)),
    ):
        lengths = (1, 0, 140, 2, 3)
        compare_both(lengths=lengths, others=others, width=width, heads=1, causal=True, dropout=0.1)
    lengths, others = (1, 0, 40, 2, 3), (4, 0, 40, 2, 3)
    compare_both(lengths=lengths, others=others, width=8, heads=3, group=3, causal=True)
    for width in (16, 344):  # of rows whose gradients are finished
        compare_both(lengths=(40, 1), width=8, heads=width // 8, to_rounded=True)


def projects():
    with gemm.ended_by(None):
        compare_cuda(rounded_project(341, 272, Activation.gelu, 0.1))


def projects_in_one():
    products.project_turns()
    products.int4_turns()
    test_project_fields_cuda.turns()


def adapters():
    compare_cuda(adapter_input(41, 48, "codes", 0.3))
    compare_cuda(adapter_input_gradient(41, 48, 0.3))
    compare_cuda(adapt_with_end(341, 72, Activation.gelu, 0.1, coded=True))


def elementwise():
    """Sums of what is left over of eights."""
    test_rounding.turns(48)
    compare_cuda(append_of(3, 7, 33, codes=True), exact=True)


def coarsened_rows():
    """Three blocks, of which the last is not full."""
    compare_cuda(test_coarsen.drawn(101, 48), exact=True)


def roundings():
    compare_cuda(Round(x=torch.randn(341, 48), rounded=to_round(341, 48, 1.0)), exact=True)


def rounded_gradients():
    for columns in (48, 1040):
        test_rounding.turns(columns)


def rounded_weights():
    """The last block poisons the scales of 3 * 256 rows."""
    rounded_gradients()
    values = torch.randn(600, 16)
    values[300, 5] = math.nan
    found = compare_cuda(weight_of(values, torch.ones(1), 608), exact=True)
    assert found.weight.scale[:600].isnan().all()
    operation = weight_of(torch.randn(600, 784), torch.ones(600), 608)
    operation.new_clip = empty(600)
    compare_cuda(operation, exact=True)


def input_gradients():
    for rows, columns in (FEW, WIDE):
        for rounded in (False, True):
            test_input_gradient.turns(rows, columns, rounded)


def weight_gradients():
    for columns, outputs in ((48, 41), (1040, 11)):
        test_weight_gradient.turns(columns, outputs)


def started_scales():
    """All that one launch writes."""
    compare_cuda(scales([0.5 + number for number in range(16)]))


def gates():
    for made in (gated(341, 88), gated_by_row(7, 6152)):
        compare_cuda(made)


def gate_gradients():
    for rows, columns in (FEW, WIDE):
        for options in ({"learned_step": True}, {"coded": False, "to_codes": False}):
            compare_cuda(gated_gradient(rows, columns, **options))


def rotations():
    for rows, options in ((41, {}), (11, {"width": 128, "queries": 6})):
        for normed in (False, True):
            forward = rotate(rows, **options, normed=normed)
            compare_cuda(forward)
            compare_cuda(gradient_of_rotation(forward))


def sums_over_neighbours():
    """One node has 143 edges, which are read 32 at a time."""
    for nodes, columns in (FEW, WIDE):
        for codes in (True, False):
            edges, options = graph(nodes), {"codes": codes, "own": 1.0}
            compare_cuda(aggregate(edges, columns, rounds=True, **options))
            compare_cuda(aggregate_gradient(edges.transposed, columns, rounds=codes, **options))


CASES = {
    "adam.cu": adam_steps,
    "adapter.cu": adapters,
    "aggregate.cu": sums_over_neighbours,
    "attention.cu": attentions,
    "attention_gradient.cu": attentions,
    "attention_rows.cu": attentions,
    "bit_product.cu": test_bit_product.turns,
    "cached_attention.cu": test_cached_attention.turns,
    "calibration.cu": test_calibration.turns,
    "coarsen.cu": coarsened_rows,
    "compact_adam.cu": test_compact_adam.turns,
    "elementwise.cu": elementwise,
    "fake_quantize.cu": test_fake_quantize.turns,
    "fake_quantize_gradient.cu": test_fake_quantize.gradient_turns,
    "embedding.cu": embeddings,
    "gradient_messages.cu": messages,
    "input_gradient.cu": input_gradients,
    "gated.cu": gates,
    "gated_gradient.cu": gate_gradients,
    "input_gradient_product.cu": products.input_turns,
    **dict.fromkeys(("next_words.cu", "next_words_product.cu"), products.words_turns),
    "int4.cu": test_int4.turns,
    "operands.cu": float_operands,
    "project.cu": projects,
    "project_product.cu": projects_in_one,
    "residual_norm.cu": norms,
    "rounding.cu": roundings,
    "rounding_gradient.cu": rounded_gradients,
    "rounding_weight.cu": rounded_weights,
    "rotation.cu": rotations,
    "sparse_project.cu": test_sparse_project_cuda.turns,
    "scales.cu": started_scales,
    "sums.cu": sums,
    "kept_gradient.cu": targets,
    "transpose.cu": transposition,
    "vocabulary_loss.cu": losses,
    **dict.fromkeys(
        ("vocabulary_loss_product.cu", "vocabulary_loss_gradient_product.cu", "vocabulary_sums.cu"),
        products.loss_turns,
    ),
    **dict.fromkeys(("rounding_weight_in_out.cu", "weight_gradient_in_out.cu"), test_borders.turns),
    "weight_gradient.cu": weight_gradients,
    "weight_gradient_product.cu": products.weight_turns,
}
"""What runs all kernels of a source."""
SOURCES = defaultdict(list)
"""The same the other way round: several kernels' sources have one run."""
for _source, _run in CASES.items():
    SOURCES[_run].append(_source)


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Kernels that count turns."""
    return CountedKernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def few_blocks(monkeypatch):
    """Kernels that stride over rows do so with two blocks."""
    monkeypatch.setattr(geometry, "strided", lambda turns, most: max(1, min(BLOCKS, turns)))


def test_every_source_has_a_case():
    assert CASES.keys() == {source.name for source in build.KERNELS.glob("*.cu")}


@pytest.mark.timeout(400)  # a case takes up to a minute on a quiet machine
@pytest.mark.thorough
@pytest.mark.parametrize(
    "run, sources", [pytest.param(run, of, id=" ".join(of)) for run, of in SOURCES.items()]
)
def test_three_turns(run, sources, counted, few_blocks, monkeypatch):
    counting = cuda.place == "emulator" and not cuda.SANITIZE
    device = counted.device() if counting else cuda.current_device()
    monkeypatch.setattr(cuda, "current_device", lambda: device)
    run()
    if counting:
        for source in sources:
            assert_three_turns(source, device.turns(source), counted.loops)


def assert_three_turns(source, found, loops):
    """Every kernel ran, came to every loop, and took three turns of each."""
    kernels = set(EXPORT.findall(build.KERNELS.joinpath(source).read_text()))
    assert found.keys() == kernels, "kernels without a case"
    reached = {loop for of in found.values() for loop in of}
    own = {loop for loop in loops if loop.startswith(f"{source}:")}
    assert own <= reached, "loops without a case"
    each = ((kernel, *one) for kernel, of in found.items() for one in of.items())
    short = [one for one in each if one[-1] < TURNS]
    assert not short, f"fewer than {TURNS} turns"
