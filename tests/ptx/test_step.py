"""Every kernel of a training step of transformer base, as NVRTC compiles it, at tiny sizes, against
the reference.

Products run by mma.sync, by wgmma, and by cuBLASLt with kernels that apply the epilogue.
"""

import dataclasses
import itertools
import re
import shutil

import pytest
import torch

from lsq import gemm
from lsq.emulator import build
from lsq.native import geometry
from lsq.native.launch import Launch
from lsq.ops import fake_quantize
from lsq.ops.nonlinearity import Activation
from lsq.ops.sums import FinishSums, PartialSums
from lsq.quant.tables import lookup
from lsq.run.cuda import launched_by_operation
from tests.ops import cuda, test_input_gradient, test_weight_gradient
from tests.ops.compare import empty, on_cpu
from tests.ops.cuda import DTYPES, compare_cuda
from tests.ops.test_adam import codes_of, numbers, state, step
from tests.ops.test_attention import compare_both
from tests.ops.test_embedding import embed, embed_gradient
from tests.ops.test_kept_gradient import input_gradient, losses, weight_gradient
from tests.ops.test_project import operands, rounded_project
from tests.ops.test_residual_norm import compare_gradients, norm
from tests.ops.test_rounding import round_of
from tests.ops.test_sums import scales
from tests.ops.test_turns_cuda import BLOCKS, SOURCES
from tests.ops.test_vocabulary_loss import of_codes, rounded_of
from tests.ops.tiles import SMALL, WARPGROUPS, in_parts, launches
from tests.ops.turns import EXPORT
from tests.optim import test_updates_cuda as updates
from tests.ptx import interpreter
from tests.ptx.interpreter import InterpretedCUDA, Interpreter, ptx_of
from tests.sampling import first, in_turn

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
TARGETS = ("compute_80", "compute_90a", "compute_120")
INDIRECT = {"indirect": ["interpreted"], "ids": lambda one: getattr(one, "__name__", str(one))}
MMA, WGMMA = SMALL, WARPGROUPS[4]


def adam(dtype):
    compare_cuda(step(state(37), numbers()))
    compare_cuda(step(state(48, 16), numbers(), codes_of(torch.ones(48), (48, 16))))


def attention(dtype):
    options = {"width": 16, "heads": 1, "causal": True, "dropout": 0.1}
    compare_both(dtype, lengths=(5, 0, 3), others=(2, 4, 9), **options)


def attention_of_rounded_rows(dtype):
    compare_both(dtype, lengths=(21, 5), width=8, heads=2, to_rounded=True)


def embedding(dtype):
    forward = compare_cuda(embed(11, 48, 0.1), dtype)
    places = forward.tokens, forward.positions
    compare_cuda(embed_gradient(torch.randn(11, 48), *places, 0.1), dtype)


def residual_norm(dtype):
    z, update = torch.randn(5, 48).to(dtype).float(), torch.randn(5, 48)
    compare_cuda(norm(z, rounds=True), dtype)
    compare_cuda(norm(z, update, kind=None, dropout=0.1), dtype)
    compare_gradients(dtype, 5, 48)


def rounding(dtype):
    compare_cuda(round_of(torch.randn(7, 48), error=True), dtype, exact=True)
    compare_cuda(scales([0.5, 2.0]))


def projects(tile, dtype):
    with gemm.ended_by(tile):
        compare_cuda(rounded_project(41, 80, Activation.gelu, 0.1), dtype, exact=tile is not None)
        compare_cuda(rounded_project(7, 32, Activation.relu, error=False), dtype)


def input_gradients(tile, dtype):
    options = {"kind": Activation.relu, "dropout": 0.1, "columns": 80, "padded": 80}
    with gemm.ended_by(tile):
        compare_cuda(test_input_gradient.case(41, **options)[0], dtype)


def weight_gradients(tile, dtype):
    options = {"columns": 48, "outputs": 70, "padded": 80}
    with gemm.ended_by(tile):
        compare_cuda(test_weight_gradient.case(41, **options), dtype)


def logits(tile, dtype):
    with gemm.ended_by(tile):
        found = compare_cuda(of_codes(9, 70, 80), dtype)
        compare_cuda(rounded_of(found), dtype)


def kept_gradients(dtype):
    found = on_cpu(losses(7, 33, 48))
    compare_cuda(input_gradient(found), dtype)
    compare_cuda(weight_gradient(found))


def sums(dtype):
    partial = PartialSums.of(torch.randn(100, 4), 0, (), empty(1), clip_parts=4)
    compare_cuda(FinishSums(sums=[partial]))


OCCURRENCES = [f"lsq_{step}_occurrences" for step in ("rank", "sort", "sum", "join")]
CASES = {
    adam: ("lsq_adam", "lsq_adam_codes"),
    attention: ("lsq_attention", "lsq_attention_key_gradient", "lsq_attention_query_gradient"),
    attention_of_rounded_rows: ("lsq_attention_gradient_rows",),
    embedding: ("lsq_embed", "lsq_zero", *OCCURRENCES),
    kept_gradients: ("lsq_kept_input_gradient", *OCCURRENCES),
    residual_norm: ("lsq_residual_norm", "lsq_residual_norm_gradient"),
    rounding: ("lsq_round", "lsq_start_scales"),
    sums: ("lsq_finish_sums",),
}
"""Case -> kernels that it launches."""
ROUNDED = ("lsq_begin_weight_gradient", "lsq_round_transposed")
LOSSES = ("lsq_sum_losses", "lsq_vocabulary_losses")
PRODUCTS = {
    projects: (("lsq_project_product",), ("lsq_end",)),
    input_gradients: (
        ("lsq_input_gradient_product",),
        ("lsq_transpose_codes", "lsq_project_input_gradient"),
    ),
    weight_gradients: (
        ("lsq_weight_gradient_product", *ROUNDED),
        ("lsq_project_weight_gradient", *ROUNDED),
    ),
    logits: (
        ("lsq_vocabulary_loss_product", "lsq_vocabulary_loss_gradient_product", *LOSSES),
        ("lsq_vocabulary_loss_product", "lsq_vocabulary_loss_gradient_product", *LOSSES),
    ),
}
"""Case -> kernels that it launches with a tile, and without one."""


def test_every_kernel_of_a_step_has_a_case():
    cases = [*CASES.values(), *itertools.chain(*PRODUCTS.values())]
    assert kernels_of_a_step() <= {name for names in cases for name in names}


def kernels_of_a_step() -> set[str]:
    """Names of the kernels that a training step of base launches, by tiles and without."""
    import gpu_lists
    from model_gpu_step import QUANT
    from operations import QUICK

    found = [gpu_lists.update(QUICK, QUANT).entries]
    for tile, dtype in itertools.product((None, MMA, WGMMA), DTYPES):
        for _, program in gpu_lists.training(QUICK, QUANT):
            with gemm.ended_by(tile):
                found += launched_by_operation(program, dtype)
    return {one.kernel.name for one in itertools.chain(*found) if isinstance(one, Launch)}


def launched(device) -> set[str]:
    return {kernel.name for kernel in device.launched}


@pytest.mark.parametrize("case, interpreted", in_turn(list(CASES), TARGETS, 1), **INDIRECT)
def test_operations(case, interpreted):
    case(DTYPES[interpreted.target == TARGETS[1]])
    assert launched(interpreted) >= set(CASES[case])


@pytest.mark.parametrize("case, tile", in_turn(list(PRODUCTS), (MMA, WGMMA, None), 2))
def test_products(case, tile, interpreted):
    case(tile, torch.float32)
    assert launched(interpreted) >= set(PRODUCTS[case][tile is None])


@pytest.mark.parametrize("case", PRODUCTS)
@pytest.mark.parametrize("tile", [MMA, WGMMA, None])
@pytest.mark.parametrize("interpreted", first(TARGETS[1:], 0, 1), indirect=True)
def test_products_of_half_precision(case, tile, interpreted):
    case(tile, torch.bfloat16)
    assert launched(interpreted) >= set(PRODUCTS[case][tile is None])


@pytest.fixture(autouse=True)
def one_multiprocessor(monkeypatch):
    """Blocks that stay make all tiles."""
    monkeypatch.setattr(geometry, "MULTIPROCESSORS", 1)


LEFT_OUT = {
    "bar.arrive": "waits for ever",
    "bar.sync": "no barrier lies between|nobody has written it|has not been waited for",
    "bar.warp.sync": "no barrier lies between|nobody has written it",
    "cp.async.wait_group": "cp.async to it has not been waited for",
    "fence.proxy.async.shared::cta": "no fence.proxy.async lies between its write and wgmma",
    "wgmma.fence.sync.aligned": "no wgmma.fence lies between a write of its sums and wgmma",
    "wgmma.wait_group.sync.aligned": "is read, but wgmma has not been waited for",
}


def leave_out(instruction, monkeypatch):
    """All of that instruction, from all kernels."""

    def without(kernel, target):
        text, count = re.subn(rf"\b{instruction}\b[^;]*;", "", ptx_of(kernel, target))
        assert count or kernel.name not in NEEDED
        return text

    monkeypatch.setattr(interpreter, "ptx_of", without)


NEEDED = ("lsq_project_product", "lsq_weight_gradient_product")


@pytest.mark.parametrize("instruction", LEFT_OUT)
def test_an_instruction_that_is_left_out_is_missed(instruction, interpreted, monkeypatch):
    leave_out(instruction, monkeypatch)
    with gemm.ended_by(WGMMA), pytest.raises(RuntimeError, match=LEFT_OUT[instruction]):
        compare_cuda(rounded_project(41, 80))


TURNS = (
    r"bar\.arrive",
    r"bar\.sync\s+%\w+, 256",
    r"cp\.async\.wait_group",
    r"wgmma\.fence",
    r"wgmma\.wait_group",
)
"""Instructions by which warpgroups take turns; all but fence.proxy.async: of those of the last two
steps one may go, since a fence covers all copies that have been waited for."""


@pytest.mark.parametrize("instruction", TURNS)
def test_one_that_is_left_out_alone_is_missed(instruction, interpreted, monkeypatch):
    """Nine tiles in a block, with more steps than stages."""
    operation = rounded_project(150, 144, **operands(150, 704, 144))
    tile = dataclasses.replace(WGMMA, stages=5)
    (entry,) = launches(operation, tile)
    text = ptx_of(entry.kernel, "compute_90a")
    places = list(re.finditer(rf"\b{instruction}\b[^;]*;", text))
    assert places
    for place in places:
        device, without = Interpreter(), text[: place.start()] + text[place.end() :]
        monkeypatch.setattr(cuda, "current_device", lambda device=device: device)
        monkeypatch.setattr(interpreter, "ptx_of", lambda *of, without=without: without)
        with gemm.ended_by(tile), pytest.raises(RuntimeError):
            compare_cuda(operation)


@pytest.mark.parametrize("tile", [MMA, WGMMA])
@pytest.mark.parametrize("instruction", [None, "membar.gl"])
def test_a_fence_between_blocks_that_is_left_out_is_missed(
    tile, instruction, interpreted, monkeypatch
):
    """The last of three blocks reads what the others have left."""
    operation = test_weight_gradient.case(341, columns=16, outputs=13, padded=16)
    with gemm.ended_by(in_parts(tile, 3)):
        if instruction is None:
            compare_cuda(operation)
            return
        leave_out(instruction, monkeypatch)
        with pytest.raises(RuntimeError, match="of block . wrote it, and nothing orders that"):
            compare_cuda(operation)


def test_steps_of_the_optimizer(interpreted):
    """Of many parameters at once, whose structs lie in a table, and the norm of their gradients."""
    updates.test_steps_are_those_of_the_cpu(InterpretedCUDA(interpreted), True)
    assert launched(interpreted) >= {"lsq_adam_table"}


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize(
    "run, sources", [pytest.param(run, of, id=" ".join(of)) for run, of in SOURCES.items()]
)
def test_three_turns_of_every_kernel(run, sources, interpreted, monkeypatch):
    """All kernels of the package with three turns of each of their loops."""

    def known_table(*of):
        """A number format's table, of which an operation's struct has the address alone."""
        table = lookup(*of)
        interpreted.known.append((table.data_ptr(), table.nbytes))
        return table

    monkeypatch.setattr(geometry, "strided", lambda turns, most: max(1, min(BLOCKS, turns)))
    monkeypatch.setattr(fake_quantize, "lookup", known_table)
    monkeypatch.setattr(updates, "CUDA", InterpretedCUDA)
    run()
    found = {kernel.name for kernel in interpreted.launched if kernel.source in sources}
    assert found == {
        name
        for source in sources
        for name in EXPORT.findall(build.KERNELS.joinpath(source).read_text())
    }
