"""Every kernel with three turns of each of its loops, on grids of two blocks where blocks stride.

From the second turn on a loop finds what the one before left in shared memory and registers; the third reads what the
second left. In the emulator, turns are counted.
"""

import math

import pytest
import torch

from lsq.csrc import emulator, geometry
from lsq.ops import embedding, kernels, transpose
from tests.ops import cuda, test_heads_cuda, test_linear_gradient_cuda, test_read_cuda
from tests.ops import test_activation_cuda as activation
from tests.ops import test_cross_entropy_cuda as cross_entropy
from tests.ops import test_residual_norm_cuda as residual_norm
from tests.ops.adam_checks import numbers, state
from tests.ops.compare import KEY
from tests.ops.cuda import compare_cuda
from tests.ops.gradient_checks import gradients, of_pack, of_unpack, packed
from tests.ops.operands import product_in
from tests.ops.test_attention_cuda import compare_both, heads
from tests.ops.test_cross_entropy import options_of
from tests.ops.test_embedding import BACKWARD, FORWARD, case
from tests.ops.test_gradient_messages_cuda import check
from tests.ops.turns import EXPORT, CountedKernels

BLOCKS, TURNS = 2, 3
FEW, WIDE = (41, 48), (11, 1040)
"""Rows and columns with three turns of two blocks, the last of them not full: of rows in a warp, and in four."""
FLOAT = torch.float32


def nan_in_each_turn(x):
    """Copies of x [M, N] with a NaN that the first turn of a block meets, the second, and the last."""
    for row in (0, x.shape[0] // 2, x.shape[0] - 1):
        poisoned = x.clone()
        poisoned[row, 5] = math.nan
        yield poisoned


def activations():
    for rows, columns in (FEW, WIDE):
        y, scale = product_in(FLOAT, "int8", rows, columns)
        options = {"activation": "relu", "dropout": 0.1, "stream": 3, "bits": 8}
        compare_cuda(activation.NAME, y, scale, torch.randn(columns), activation.CLIP, KEY, exact=True, **options)
        activation.compare_gradients(FLOAT, "int8", rows, columns, "relu", True, 0.1, True)
    for y in nan_in_each_turn(torch.randn(FEW)):
        compare_cuda(activation.NAME, y, None, torch.randn(48), activation.CLIP, KEY, **options)


def adam_steps():
    compare_cuda("adam", *state(1027), numbers(), None)
    for clips in (1, 48):
        weight, gradient, first, second = state(48, 400)
        gradient[[3, 20, 35, 36, 40, 47], [0, 127, 128, 131, 256, 399]] = math.nan
        compare_cuda("adam", weight, gradient, first, second, numbers(), torch.ones(clips))


def attention():
    compare_both(*heads(41, 41), None, dropout=0.2)


def losses():
    for rows, vocabulary, padded in ((3, 8200, 8208), (300, 33, 48)):
        operands = cross_entropy.integers(rows, vocabulary, padded)
        options = options_of(vocabulary, 0.1, stream=3)
        *_, normaliser, _, _ = compare_cuda(cross_entropy.NAME, *operands, KEY, **options)
        cross_entropy.compare_gradient(operands, normaliser, options)
    compare_cuda("scale_rows", torch.randn(300), torch.tensor([0.5]))


def elements():
    for rows, columns in ((41, 48), (7, 91)):
        y, scale = product_in(FLOAT, "int32", rows, columns)
        compare_cuda("read_product", y, scale, torch.randn(columns), bits=8)
    compare_cuda("add", torch.randn(41, 47), torch.randn(41, 47))
    compare_cuda("append_time", torch.randn(3, 3, 6, 16), torch.randn(3, 3, 1, 16))


def embeddings():
    """Three tiles of occurrences for each split, three splits, and words over many windows."""
    options = FORWARD | {"dropout": 0.1, "learned": True}
    for batch, time, columns in ((41, 1, 48), (1, 11, 1040), (3, 607, 48)):
        tokens, places, weight, table = case(batch, time, columns)
        compare_cuda("embedding", tokens, places, weight, table, KEY, **options)
    compare_cuda("embedding_backward", torch.randn(1821, 48), tokens, places, KEY, **options, **BACKWARD)


def messages():
    for bits in (8, 4):
        layout, copies = packed(600, 17, bits=bits)
        check("gradient_pack", gradients(9, 600), KEY, **of_pack(layout, error=True, stochastic=True, stream=5))
        options = {"length": layout.length, "bits": bits, "factor": 1 / 17}
        check("gradient_sum", copies[:, 0].contiguous(), KEY, **options, stochastic=True, stream=2)
        check("gradient_unpack", copies, **of_unpack(layout, factor=0.7))


def rows_of_heads():
    for parts, time, width in ((3, 41, 16), (1, 11, 352)):
        test_heads_cuda.compare_split(FLOAT, "int8", parts, 1, time, width=width)
        test_heads_cuda.compare_gradients(FLOAT, parts, 1, time, width=width, rounded=True, clipped=True, error=True)
        for context in nan_in_each_turn(torch.randn(time, 3 * width)):
            context = context.view(1, time, 3, width).transpose(1, 2).contiguous()
            compare_cuda("merge_heads", context, torch.tensor([1.4]), exact=True, bits=8, error=True)


def linear():
    x, weight = (torch.randint(-127, 128, (rows, 48), dtype=torch.int8) for rows in (41, 32))
    scales = torch.tensor([0.01]), 1e-3 * (1 + torch.rand(32))
    compare_cuda("linear_int8", x, scales[0], weight, scales[1], torch.tensor([0.7]), exact=True, bits=8)
    compare_cuda("linear_int32", x, scales[0], weight, scales[1], exact=True)
    x, weight = torch.randn(7, 48).bfloat16(), torch.randn(33, 48).bfloat16().float()
    compare_cuda("linear", x, weight, dtype=torch.bfloat16, floats=(0,))
    target = cuda.current_device()
    out = torch.ones(4099, device=target.place)
    target.run([kernels.zero(out)])
    assert not out.any()


def linear_gradients():
    """The weight has fewer rows than its codes, so that its last turn is not full."""
    for inner in (48, 1040):
        operands = test_linear_gradient_cuda.operands(41, inner=inner, outputs=48, clips=48, error=True)
        test_linear_gradient_cuda.input_gradient(operands, "int8", bits=8)
        gradient, codes, weight, clip, *scale = operands
        operands = gradient, codes, weight[:41].contiguous(), clip[:41].contiguous(), *scale
        test_linear_gradient_cuda.weight_gradient(operands, "int8", bits=8, clip_gradient="lsq")


def quantization():
    for rows, columns in (FEW, WIDE):
        x = torch.randn(rows, columns)
        for given in (x, *nan_in_each_turn(x)):
            compare_cuda("quantize", given, torch.tensor([1.5]), exact=True, bits=8, error=True)


def two_layouts():
    for rows, columns in (FEW, WIDE):
        operands = torch.randn(rows, columns), 0.5 + torch.rand(columns), KEY
        compare_cuda("quantize_transpose", *operands, exact=True, stream=3, column_stream=4)


def weights():
    for weight in nan_in_each_turn(torch.randn(600, 48)):
        compare_cuda("quantize_weight", weight, torch.ones(1), exact=True, bits=8, rows=608)
    for weight in nan_in_each_turn(torch.randn(41, 1040)):
        compare_cuda("quantize_weight", weight, 0.5 + torch.rand(41), exact=True, bits=8, rows=90)


def products_read():
    for rows, columns in (FEW, WIDE):
        test_read_cuda.compare_gradients(FLOAT, rows, columns, True, True, True)


def norms():
    for rows, columns in (FEW, WIDE, (5, 2064)):
        z = torch.randn(rows, columns)
        for given in (z, *nan_in_each_turn(z)):
            residual_norm.compare_norm(given, FLOAT, 8)
        y, scale = product_in(FLOAT, "int8", rows, columns)
        operands = y, scale, torch.randn(columns), torch.randn(rows, columns)
        options = residual_norm.OPTIONS | {"dropout": 0.1}
        compare_cuda(residual_norm.NAME, *operands, None, None, None, KEY, **options)
        residual_norm.compare_gradients(FLOAT, rows, columns, True, True, True, True, 0.1)
    residual_norm.compare_gradients(FLOAT, *WIDE, product=False)


def slots():
    """Every operation that is compared writes its slots."""
    compare_cuda("add", torch.randn(8), torch.randn(8))


def sums():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "strided", lambda turns, most: min(most, turns))
        test_read_cuda.compare_gradients(FLOAT, 341, 48, True, True, True)
    test_linear_gradient_cuda.test_parts_of_a_sum_are_added_up(1000)


def transposition():
    """Runs of 114 rows, which 32 at a time are read; the largest magnitudes of 22 runs, 8 at a time."""
    for tile in (128, 16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transpose, "TILE", tile)
            for layout in ({"rows": False}, {"shared_scale": True}):
                operands = torch.randn(341, 48), 0.5 + torch.rand(48), KEY
                compare_cuda("quantize_transpose", *operands, exact=True, column_stream=4, **layout)


CASES = {
    "activation.cu": activations, "adam.cu": adam_steps, "attention.cu": attention, "cross_entropy.cu": losses,
    "elementwise.cu": elements, "embedding.cu": embeddings, "gradient_messages.cu": messages,
    "heads.cu": rows_of_heads, "linear.cu": linear, "linear_gradient.cu": linear_gradients,
    "quantize.cu": quantization, "quantize_transpose.cu": two_layouts, "quantize_weight.cu": weights,
    "read.cu": products_read, "residual_norm.cu": norms, "slots.cu": slots, "sums.cu": sums,
    "transpose.cu": transposition,
}  # fmt: skip
"""What runs all kernels of a source."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Kernels that count turns."""
    return CountedKernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def few_blocks(monkeypatch):
    """Kernels that stride over rows do so with two blocks."""
    monkeypatch.setattr(geometry, "strided", lambda turns, most: max(1, min(BLOCKS, turns)))
    monkeypatch.setattr(embedding, "SPLITS", TURNS)


def test_every_source_has_a_case():
    assert CASES.keys() == {source.name for source in emulator.KERNELS.glob("*.cu")}


@pytest.mark.parametrize("source", CASES)
def test_three_turns(source, counted, few_blocks, monkeypatch):
    counting = cuda.place == "emulator" and not cuda.SANITIZE
    device = counted.device() if counting else cuda.current_device()
    monkeypatch.setattr(cuda, "current_device", lambda: device)
    CASES[source]()
    if not counting:
        return
    found = device.turns(source)
    assert found.keys() == set(EXPORT.findall(emulator.KERNELS.joinpath(source).read_text())), "kernels without a case"
    reached = {loop for of in found.values() for loop in of}
    assert {loop for loop in counted.loops if loop.startswith(f"{source}:")} <= reached, "loops without a case"
    short = {f"{kernel}: {loop}": turns for kernel, of in found.items() for loop, turns in of.items() if turns < TURNS}
    assert not short, f"fewer than {TURNS} turns"
