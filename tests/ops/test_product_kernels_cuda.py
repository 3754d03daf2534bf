"""Kernels for product and epilogue: exact by every tile; traffic, banks and registers."""

import math
import shutil
from types import SimpleNamespace

import pytest
import torch

from lsq import gemm
from lsq.native.launch import TICKETS, Launch
from lsq.ops.input_gradient_cuda import input_gradient_product
from lsq.ops.nonlinearity import Activation
from lsq.ops.project import Project
from lsq.ops.project_cuda import packed_tile, project_product
from lsq.ops.sums import FinishSums
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Weight
from lsq.quant import WEIGHT_FORMATS, Grain
from tests.ops import cuda
from tests.ops.compare import (
    by_row,
    empty,
    on_cpu,
    refused,
    weight_format_of,
)
from tests.ops.cuda import DTYPES, ORDERS, current_device, in_dtype, run
from tests.ops.test_input_gradient import case as input_case
from tests.ops.test_next_words import plain_words
from tests.ops.test_project import operands, operands_by_row, rounded_project
from tests.ops.test_vocabulary_loss import gradient_of, of_codes, rounded_of
from tests.ops.test_weight_gradient import case as weight_case
from tests.ops.tiles import (
    SMALL,
    TARGETS,
    TILES,
    TURNED,
    WARPGROUPS,
    assert_nothing_spills,
    assert_two_blocks_fit,
    assert_whole_sectors,
    few_blocks,
    here,
    in_one,
    in_parts,
    largest_tile,
    launches,
    multiplications,
    names,
    traffic,
    with_tiles,
)
from tests.sampling import first

ALL = (*TILES, *WARPGROUPS)
objdump = pytest.mark.skipif(
    shutil.which("objdump") is None, reason="instructions are counted by objdump"
)


def kernel_of(operation, tile, name: str) -> Launch:
    """The launch of that kernel."""
    entries = launches(operation, tile)
    return next(one for one in entries if isinstance(one, Launch) and one.kernel.name == name)


# Project; every end by one launch: test_project.py


def rounded(rows, inner, outputs, *end, **given):
    return rounded_project(rows, outputs, *end, **operands(rows, inner, outputs) | given)


def project_turns(tiles=TURNED[1:]):
    """Three steps along K and more, and all rows of a tile's quarter."""
    for tile in tiles:
        in_one(rounded(150, 272, 144, Activation.gelu, 0.1), tile)


@pytest.mark.parametrize(
    "tile, rows, inner, outputs",
    with_tiles([(0, 64, 32), (1, 16, 16), (41, 80, 48), (130, 336, 144)]),
)
def test_codes_of_a_project_are_exact(tile, rows, inner, outputs):
    found = in_one(rounded(rows, inner, outputs), tile)
    assert torch.equal(found.rounded.scale, found.rounded.clip / found.rounded.largest)
    assert rows < 7 or found.rounded.clipped.any()


def test_blocks_make_several_tiles_on_a_large_gpu_too(monkeypatch):
    large = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: large)

    def grid():
        return kernel_of(rounded(300, 272, 144), WARPGROUPS[-1], "lsq_project_product").grid

    assert grid() == (15, 1, 1)
    with few_blocks():
        assert grid() == (2, 1, 1)


def test_a_gpu_without_wgmma_takes_another_tile(monkeypatch):
    monkeypatch.setattr(cuda, "place", "gpu")
    for capability, tile in (((8, 0), in_parts(SMALL, 3)), ((9, 0), in_parts(WARPGROUPS[0], 3))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert here(in_parts(WARPGROUPS[0], 3)) == tile and here(TILES[0]) == TILES[0]


def test_a_scale_for_each_row_by_warpgroups():
    in_one(rounded_project(41, 80, **operands_by_row(41, 48, 80)), WARPGROUPS[-1])
    sizes = {"columns": 144, "outputs": 70, "padded": 80}
    compare_weight(41, WARPGROUPS[-1], form=by_row, **sizes)


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("tile", [SMALL, WARPGROUPS[-1], WARPGROUPS[-2]], ids=str)
def test_fewer_steps_than_stages_and_more(tile, steps):
    in_one(rounded(3, 64 * steps + 16, 16), tile)


@pytest.mark.parametrize("started", [False, True])
def test_nan_poisons_the_scale(started):
    operation = rounded(70, 48, 144)
    operation.rounded.started = started
    operation.bias[100] = math.nan
    assert in_one(operation, SMALL).rounded.scale.isnan()


INT4 = WEIGHT_FORMATS["int4"](8, Grain.ROW)


def int4_and_int8(inner, outputs) -> tuple[Weight, Weight]:
    """A weight as int4 stores it, and its codes."""
    stored, scale = INT4.encode(torch.randn(outputs, inner), 1.0 + torch.rand(outputs))
    codes = INT4.unpack(stored, inner).contiguous()
    plain = Weight(format=weight_format_of(), codes=codes, scale=0.05 * scale)
    return Weight(format=INT4, codes=stored, scale=0.05 * scale), plain


@pytest.mark.parametrize(
    "rows, inner, outputs",
    [(1, 16, 16), (3, 32, 80), (41, 48, 32), (64, 272, 144), (5, 208, 64), (130, 528, 48)],
)
@pytest.mark.parametrize("activation", first([Activation.gelu, Activation.none], 1))
def test_codes_of_stored_int4_are_those_of_int8(rows, inner, outputs, activation):
    given, (stored, plain) = operands(rows, inner, outputs), int4_and_int8(inner, outputs)
    each = ({"weight": weight} for weight in (plain, stored))
    wanted, operation = (rounded_project(rows, outputs, activation, **given | one) for one in each)
    wanted = on_cpu(wanted).rounded
    for order in ORDERS:
        found = run(operation, order=order).rounded
        for name in ("codes", "scale", "clipped"):
            assert torch.equal(getattr(found, name), getattr(wanted, name))


def int4_turns():
    """Three steps along K and more, by both tiles."""
    for rows in (41, 150):
        test_codes_of_stored_int4_are_those_of_int8(rows, 272, 144, Activation.gelu)


def test_every_code_of_int4_under_every_multiplier():
    q, x = torch.arange(-8, 8.0).repeat(2), torch.eye(32, dtype=torch.int8)
    values = torch.stack([m * q / 2 for m in (*range(-15, 0), *range(1, 16))] + [0 * q, q])
    codes, scale = INT4.encode(values, torch.tensor([60.0]).expand(32))
    weight = Weight(format=INT4, codes=codes, scale=torch.ones(32))
    given = operands(32, 32, 32) | {"weight": weight, "bias": None}
    given["x"].coded.codes, given["x"].coded.scale = x, scale[:1]
    assert torch.equal(run(Project(**given, out=empty(32, 32))).out.t()[:30], values[:30])


@pytest.mark.thorough
def test_int4_is_read_as_it_is_stored():
    """16 bytes and a multiplier for 32 values; a row's last word belongs to two steps."""
    rows, inner, outputs = 16, 512, 128
    stored, _ = int4_and_int8(inner, outputs)
    operation = rounded(rows, inner, outputs, weight=stored)
    (entry,) = launches(operation, None)
    read = traffic(entry)[1][id(stored.codes)].reads.bytes
    assert read <= 1.2 * stored.codes.numel() < 0.64 * inner * outputs


# ProjectInputGradient


def compare_input(rows, tile, **given):
    operation, _ = input_case(rows, **given)
    found = in_one(operation, tile)
    assert torch.equal(found.dx, on_cpu(operation).dx)
    return found


def input_turns(tiles=TURNED[1:]):
    """Three steps along K and more, and all rows of a tile's quarter."""
    options = {"kind": Activation.relu, "dropout": 0.1, "learned_step": True}
    for tile in tiles:
        compare_input(150, tile, **options, columns=144, padded=272)


@pytest.mark.parametrize(
    "tile, rows, columns, padded", with_tiles([(1, 16, 16), (41, 80, 48), (130, 144, 336)])
)
def test_gradients_of_inputs_are_exact(tile, rows, columns, padded):
    options = {"kind": Activation.relu, "added": True, "columns": columns, "padded": padded}
    found = compare_input(rows, tile, **options)
    assert rows == 1 or (found.sum.any() and found.dclip.any())


# ProjectWeightGradient


def compare_weight(rows, tile, **given):
    operation = weight_case(rows, **given)
    found = in_one(operation, tile)
    assert torch.equal(found.dweight, on_cpu(operation).dweight)
    return found


def weight_turns(tiles=TURNED):
    """Three steps along K and more, all rows of a tile's quarter, and three blocks for a tile."""
    for tile in (*tiles, *(in_parts(tile, 4) for tile in tiles)):
        compare_weight(272, tile, learned_step=True, columns=144, outputs=139, padded=144)


@pytest.mark.parametrize("split", first([3, 1], 1))
@pytest.mark.parametrize(
    "tile, rows, columns, outputs", with_tiles([(1, 16, 13), (41, 48, 70), (341, 144, 139)])
)
def test_gradients_of_weights_are_exact(tile, split, rows, columns, outputs):
    sizes = {"columns": columns, "outputs": outputs, "padded": -(-outputs // 16) * 16}
    compare_weight(rows, in_parts(tile, split), learned_step=True, **sizes)


@pytest.mark.parametrize("split", range(1, 7))
@pytest.mark.parametrize("rows", [7, 130, 300])
def test_more_parts_than_steps_and_fewer(split, rows):
    compare_weight(rows, in_parts(SMALL, split))


@pytest.mark.parametrize("learned_step", [False, True])
@pytest.mark.parametrize("clips", [None, 1])
def test_every_end_of_a_weight_gradient_in_parts(learned_step, clips):
    options = {"learned_step": learned_step, "clips": clips}
    sizes = {"columns": 80, "outputs": 93, "padded": 96}
    assert compare_weight(341, in_parts(SMALL, 2), **options, **sizes).dclip.all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_poisoned_row_poisons_the_whole_gradient(value):
    operation = weight_case(141)
    operation.gradient.scale[40] = value
    found = in_one(operation, in_parts(SMALL, 2))
    inside = operation.weight.values.abs() <= operation.weight.clip[:, None]
    assert found.dweight[inside].isnan().all()


def test_tickets_are_left_at_zero():
    target = current_device()
    in_one(weight_case(341), in_parts(SMALL, 3))
    assert not target.memory(target.stream(), 0, False).ticket.any()


# Sums of both gradients


def test_a_gradient_of_clips_that_nobody_wants():
    operation = weight_case(41)
    operation.dclip = None
    in_one(operation, SMALL)


@pytest.mark.parametrize(
    "made",
    [
        lambda: input_case(150, columns=144)[0],
        lambda: weight_case(150, columns=144, outputs=70, padded=80),
        lambda: weight_case(150, columns=144, outputs=70, padded=80, clips=1),
    ],
)
def test_sums_that_are_left_are_finished_alike(made):
    operation = made()
    with gemm.ended_by(SMALL):
        expected = run(operation)
        (left,) = operation.leave_sums(lambda name, shape, dtype: empty(*shape))
        left.parts = run(operation).parts
    finished = run(FinishSums(sums=[left])).sums[0]
    wanted = [getattr(expected, name, None) for name in ("sum", "dclip")]
    found = [one for one in (finished.first, finished.clip) if one is not None]
    assert all(map(torch.equal, found, [one for one in wanted if one is not None]))


@pytest.mark.parametrize(
    "made, planned, now",
    [
        (lambda: input_case(41)[0], "6, 52", "2, 52"),
        (lambda: weight_case(41, clips=1), "29, 1", "4, 1"),
    ],
)
def test_parts_of_another_way(made, planned, now):
    operation = made()
    with gemm.ended_by(None):
        operation.leave_sums(lambda name, shape, dtype: torch.empty(shape, dtype=dtype))
    with refused(rf"are \[{planned}\], and products as they are tuned now leave \[{now}\]"):
        launches(operation, SMALL)


# VocabularyLoss


def loss_by(tile, operation):
    return in_one(operation, tile, exact=False)


def loss_turns(tiles=TURNED[1:]):
    """Three steps along K and more, all rows of a tile's quarter, and many tiles of a row."""
    for tile in tiles:
        operation = of_codes(150, 290, 304, inner=272)
        operation.prediction.target[::2] = 289  # in the last tile
        found = loss_by(tile, operation)
        loss_by(tile, gradient_of(found))
        loss_by(tile, rounded_of(found))
    loss_by(SMALL, of_codes(3, 2040, 2048))  # 32 tiles, which 8 threads of a row take
    loss_by(SMALL, of_codes(1030, 33, 48))


@pytest.mark.parametrize(
    "tile, rows, vocabulary, padded", with_tiles([(1, 2, 16), (41, 270, 272), (130, 129, 144)])
)
def test_every_tile_of_logits(tile, rows, vocabulary, padded):
    """Gradients do not depend on tiles; sums of a row are added in the order of tiles."""
    operation = of_codes(rows, vocabulary, padded)
    operation.prediction.target[-1] = vocabulary - 1
    found, host = loss_by(tile, operation), on_cpu(operation)
    for name in ("loss", "nll", "normaliser", "bound"):
        torch.testing.assert_close(getattr(found, name), getattr(host, name), rtol=2e-6, atol=1e-6)
    assert torch.equal(*(loss_by(one, gradient_of(host)).dlogits for one in (tile, SMALL)))
    assert torch.equal(*(loss_by(one, rounded_of(host)).rounded.codes for one in (tile, SMALL)))


@pytest.mark.parametrize("inner", [16, 64, 336])
def test_steps_along_the_inner_dimension_of_logits(inner):
    loss_by(SMALL, rounded_of(loss_by(SMALL, of_codes(7, 33, 48, inner=inner))))


@pytest.mark.parametrize("word", first([127, 128, 269, 0, 63, 64, 255, 256], 2))
def test_targets_at_the_edges_of_tiles(word):
    operation = of_codes(5, 270, 272)
    operation.prediction.target[:] = word
    loss_by(TILES[0], gradient_of(loss_by(TILES[0], operation)))


@pytest.mark.parametrize("word", [-7, 33, 47, 48, 10**12])
def test_a_target_outside_the_vocabulary_makes_the_losses_and_its_row_nan(word):
    operation = of_codes(7, 33, 48)
    normaliser = on_cpu(operation).normaliser
    operation.prediction.target[:] = 5
    operation.prediction.target[2] = word
    found = run(operation)
    assert found.loss.isnan() and found.nll.isnan()
    assert found.bound.isnan().tolist() == [row == 2 for row in range(7)]
    torch.testing.assert_close(found.normaliser, normaliser)
    gradient = run(rounded_of(found)).rounded
    assert gradient.scale[2].isnan() and not gradient.codes[2].any() and gradient.codes[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_logits_as_floats(dtype):
    in_one(gradient_of(on_cpu(of_codes(70, 270, 272))), SMALL, dtype, exact=False)


def test_a_row_of_logits_that_is_not_finite_has_no_codes():
    found = on_cpu(of_codes(7, 33, 48))
    found.prediction.target[:] = 5
    found.bound[:] = 1.0
    found.bound[2], found.normaliser[2] = math.inf, math.nan
    made = loss_by(SMALL, rounded_of(found)).rounded
    assert made.scale[2].isnan() and not made.codes[2].any() and made.codes[3].any()


# All of them


def words_turns(tiles=TURNED[1:]):
    """Three steps along the inner dimension, a tile's quarter, many parts and groups."""
    for tile in tiles:
        in_one(plain_words(150, 290, 3, 1, inner=272), tile, exact=False)
    in_one(plain_words(3, 16440, 100, 20, every=True, inner=16), SMALL, exact=False)
    in_one(plain_words(3, 300, 3, 1, inner=1552), SMALL, exact=False)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "turns", [project_turns, input_turns, weight_turns, loss_turns, words_turns]
)
def test_three_turns_of_every_tile(turns):
    turns(ALL)


def test_launches():
    """Nothing is launched that is not needed."""
    back, _ = input_case(41)
    product = "lsq_input_gradient_product"
    assert names(launches(back, SMALL)) == [product, "lsq_finish_own_sums"]
    back.sum = back.dclip = None
    assert names(launches(back, SMALL)) == [product]
    assert names(launches(back, WARPGROUPS[0])) == ["lsq_transpose_codes", product]
    back.weight.transposed = back.weight.codes.t().contiguous()
    assert names(launches(back, WARPGROUPS[0])) == [product]
    back, _ = input_case(41, rounded=True, rest=False)
    assert names(launches(back, SMALL))[1:] == ["product", "lsq_project_input_gradient"]
    of_weight, operands = weight_case(341), ["lsq_begin_weight_gradient", "lsq_round_transposed"]
    product = "lsq_weight_gradient_product"
    assert names(launches(of_weight, SMALL)) == [*operands, product, "lsq_finish_own_sums"]
    of_weight.dclip = None
    assert names(launches(of_weight, in_parts(SMALL, 3))) == [*operands, product]
    apart = [*operands, "product", "lsq_project_weight_gradient"]
    assert names(launches(weight_case(341), None)) == apart
    loss, none = of_codes(300, 33, 48), of_codes(0, 33, 48)
    kernels = ["lsq_vocabulary_loss_product", "lsq_vocabulary_losses", "lsq_sum_losses"]
    assert names(launches(loss, None)) == kernels and names(launches(none, None)) == kernels[2:]
    product = "lsq_vocabulary_loss_gradient_product"
    assert names(launches(rounded_of(on_cpu(loss)), None)) == [product]
    assert not launches(gradient_of(none), None)
    for best, asked, every in ((8, 1, False), (0, 0, True), (0, 2, False)):
        found = launches(plain_words(5, 300, best, asked, every=every), None)
        assert names(found) == ["lsq_next_words_product", "lsq_next_words"]
    assert not launches(plain_words(0, 300, 8, 0), None)


def test_what_the_kernels_do_not_take():
    inner, outer = (
        "inner width of an int8 product is 40.*multiple of 16",
        "outer width is {}.*of 16",
    )
    for operation, message in (
        (rounded(7, 40, 32), inner),
        (rounded(7, 48, 40), outer.format(40)),
        (of_codes(7, 33, 48, inner=40), inner),
        (of_codes(7, 33, 33), outer.format(33)),
        (plain_words(2, 300, 4, 0, inner=40), inner),
        (weight_case(7, columns=40), "width of a weight is 40.*multiple of 16"),
    ):
        with refused(message):
            launches(operation, SMALL)
    many = VirtualTensor(name="x", shape=(2**23, 16), dtype=torch.int8)
    operation = rounded(7, 16, 16).bind(lambda tensor: many if tensor.shape == (7, 16) else tensor)
    with refused("8388608 rows are more than 4194240: take smaller batches"):
        project_product(operation, SMALL)
    operation, _ = input_case(41, rounded=True)
    weight = operation.weight.codes.t().contiguous()
    with refused("ends by tiles has floats"):
        input_gradient_product(operation, SMALL, weight, torch.empty(2, 52))
    operation, _ = input_case(7, columns=40)
    operation.weight.transposed = operation.weight.codes.t().contiguous()
    with refused(outer.format(40)):
        launches(operation, SMALL)
    wide = weight_case(7, columns=64 * 65, outputs=64 * 65, padded=64 * 65)
    with refused(f"4160 x 4160 has more than {TICKETS} of them"):
        launches(wide, in_parts(SMALL, 2))


def project_traffic(tile):
    operation = rounded(128, 128, 128)
    (entry,) = launches(operation, tile)
    found, of = traffic(entry)
    given = entry.arguments[0]
    assert_whole_sectors(of[id(given.rounded.codes)].writes, 128**2)
    return found, of[id(given.x.tensor)], of[id(given.weight.codes)]


def input_traffic(tile):
    operation, _ = input_case(128, rest=False, columns=128, padded=128)
    entry = kernel_of(in_dtype(operation, torch.bfloat16), tile, "lsq_input_gradient_product")
    found, of = traffic(entry)
    given, weight, *_ = entry.arguments
    assert_whole_sectors(of[id(given.dx)].writes, 2 * 128**2)
    weight = given.weight.codes if weight is None else weight
    return found, of[id(given.gradient.codes)], of[id(weight)]


def weight_traffic(tile):
    operation = weight_case(128, columns=128, outputs=128, padded=128)
    entry = kernel_of(operation, tile, "lsq_weight_gradient_product")
    found, of = traffic(entry)
    given, gradient, x, *_, parts, _ = entry.arguments
    assert of[id(given.dweight)].writes.bytes == 4 * 128**2
    if parts is not None:  # the last block of a tile has its own
        assert_whole_sectors(of[id(parts)].writes, tile.split * 4 * 128**2)
        assert_whole_sectors(of[id(parts)].reads, (tile.split - 1) * 4 * 128**2)
    return found, of[id(given.gradient.codes if gradient is None else gradient)], of[id(x)]


@objdump
@pytest.mark.parametrize("tile", first([SMALL, WARPGROUPS[1], TILES[0], WARPGROUPS[-1]], 0, 2))
@pytest.mark.parametrize("counted", [project_traffic, input_traffic, weight_traffic])
def test_no_conflicts_whole_sectors_and_no_more_multiplications_than_needed(counted, tile):
    assert_frugal(counted, tile)


@objdump
def test_a_product_in_parts_is_as_frugal():
    assert_frugal(weight_traffic, in_parts(SMALL, 2))


def assert_frugal(counted, tile):
    found, a, b = counted(tile)
    assert found.shared_passes == found.shared_least
    assert multiplications(found, tile) == 128**3
    assert_whole_sectors(a.reads, 128**3 // tile.columns)
    assert_whole_sectors(b.reads, 128**3 // tile.rows)


@pytest.mark.thorough
@objdump
@pytest.mark.parametrize("tile", first([SMALL, TILES[0]], 1, 0), ids=str)
def test_no_conflicts_whole_sectors_and_no_logits_of_a_loss(tile):
    rows, inner, words = 128, 128, 256
    loss = on_cpu(of_codes(rows, words, words, inner=inner))
    forward, join, _ = launches(loss, tile)
    (backward,) = launches(rounded_of(loss), tile)
    for entry in (forward, backward):
        found, of = traffic(entry)
        assert found.shared_passes == found.shared_least
        assert multiplications(found, tile) == rows * inner * words
        x = of[id(entry.arguments[0].prediction.x.coded.codes)].reads
        assert_whole_sectors(x, rows * inner * words // tile.columns)
    codes = traffic(backward)[1][id(backward.arguments[0].rounded.codes)].writes
    assert_whole_sectors(codes, rows * words)
    parts = 32 * rows * words // tile.columns
    assert_whole_sectors(traffic(forward)[1][id(forward.arguments[2])].writes, parts)
    assert_whole_sectors(traffic(join)[1][id(join.arguments[1])].reads, parts)


@pytest.mark.thorough
@objdump
def test_no_conflicts_whole_sectors_and_no_logits_of_next_words():
    rows, words, inner, best, asked, tile = 128, 256, 64, 3, 2, TILES[0]
    product, join = launches(plain_words(rows, words, best, asked, inner=inner), tile)
    found, of = traffic(product)
    given, (_, _, groups, parts) = product.arguments[0], product.arguments
    left = 8 * rows * words // (tile.columns // 2)
    assert found.shared_passes == found.shared_least
    assert multiplications(found, tile) == rows * inner * words
    assert of[id(given.weight.codes)].reads.bytes == words * inner
    assert_whole_sectors(of[id(groups)].writes, 4 * rows * words // 8)
    assert of[id(parts)].writes.bytes == left
    _, of = traffic(join)
    assert_whole_sectors(of[id(given.weight.codes)].reads, rows * (8 * best + asked) * inner)
    assert of[id(parts)].reads.bytes == 2 * left


def ended(started=True):
    operation = rounded(7, 48, 32, Activation.gelu, 0.1)
    operation.rounded.started = started
    return operation


def kernels_by(tile) -> list[Launch]:
    """Of each product."""
    loss = on_cpu(of_codes(7, 33, 48))
    every = [ended(), input_case(7)[0], weight_case(7), loss, rounded_of(loss), gradient_of(loss)]
    entries = [one for each in (*every, plain_words(7, 300, 4, 1)) for one in launches(each, tile)]
    return [one for one in entries if isinstance(one, Launch) and "product" in one.kernel.source]


@pytest.mark.parametrize("target", TARGETS)
def test_two_blocks_fit_and_nothing_spills(target):
    for tile in (largest_tile(target), SMALL):
        for entry in kernels_by(tile):
            assert_two_blocks_fit(entry, target)
    assert_two_blocks_fit(launches(plain_words(7, 300, 4, 1), SMALL)[1], target)
    for rows in (64, 65):
        operation = ended()
        operation.weight = int4_and_int8(48, 32)[0]
        assert_two_blocks_fit(project_product(operation, packed_tile(INT4, rows, 48)), target)


@pytest.mark.parametrize("tile", first(WARPGROUPS, 0, 1))
def test_wgmma_spills_nothing(tile):
    for entry in kernels_by(tile):
        assert_nothing_spills(entry, "sm_90a")
