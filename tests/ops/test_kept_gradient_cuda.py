"""What kept words add to gradients on CUDA: kernels in the emulator, or on a GPU."""

import dataclasses

import pytest
import torch

from lsq.native import compiler
from tests.ops.compare import on_cpu
from tests.ops.cuda import DTYPES, compare_cuda, run
from tests.ops.test_kept_gradient import input_gradient, losses, rounded_rest, weight_gradient
from tests.ops.test_vocabulary_loss import PADDING
from tests.ops.tiles import launches, names


@pytest.mark.parametrize("rows", [0, 1, 41])
@pytest.mark.parametrize("vocabulary, padded", [(2, 16), (33, 48), (290, 304)])
def test_losses_and_codes(rows, vocabulary, padded):
    found = compare_cuda(losses(rows, vocabulary, padded))
    rounded = compare_cuda(rounded_rest(found)).rounded
    words = found.prediction.target, found.kept.likeliest
    assert not any(rounded.codes[torch.arange(rows), word].any() for word in words)


@pytest.mark.parametrize("rows, inner", [(0, 48), (1, 48), (41, 48), (35, 1040)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_gradients(rows, inner, dtype):
    found = on_cpu(losses(rows, 33, 48, inner=inner))
    compare_cuda(input_gradient(found), dtype)
    compare_cuda(weight_gradient(found), dtype)
    compare_cuda(weight_gradient(found, clips=1), dtype)


@pytest.mark.parametrize("rows", [15, 16, 17, 200])
def test_a_frequent_word(rows):
    """Its occurrences fill several windows."""
    loss = losses(rows, 33, 48)
    loss.prediction.target[:] = 7
    loss.prediction.target[rows // 2 :: 5] = 9
    compare_cuda(weight_gradient(on_cpu(loss)))


def test_sums_are_added_to_what_is_there():
    operation = weight_gradient(on_cpu(losses(41, 33, 48)))
    whole = run(dataclasses.replace(operation, dweight=operation.others)).dweight
    assert torch.equal(whole, run(operation).dweight)


def test_launches():
    """In a program the sums are added where the others' gradient is."""
    operation = weight_gradient(on_cpu(losses(41, 33, 48)))
    kernels = [
        "lsq_rank_occurrences",
        "lsq_sort_occurrences",
        "lsq_sum_occurrences",
        "lsq_join_occurrences",
    ]
    assert names(launches(operation, None)) == ["lsq_float_operand", *kernels]
    assert (
        names(launches(dataclasses.replace(operation, dweight=operation.others), None)) == kernels
    )


@pytest.mark.parametrize("word", [-7, 33, 10**12])
def test_a_target_outside_the_vocabulary_makes_its_row_nan(word):
    loss = losses(7, 33, 48)
    loss.prediction.target[:] = 5
    loss.prediction.target[2] = word
    found = run(loss)
    assert found.bound.isnan().tolist() == [row == 2 for row in range(7)]
    assert run(input_gradient(found)).dx.isnan().any(dim=1).tolist() == [
        row == 2 for row in range(7)
    ]
    assert run(weight_gradient(found)).dweight.isfinite().all()


def test_padding_has_no_gradient():
    loss = losses(7, 33, 48)
    loss.prediction.target[:] = PADDING
    found = compare_cuda(loss)
    assert not found.kept.gradient.any()
    operation = weight_gradient(found)
    assert torch.equal(compare_cuda(operation).dweight, operation.others)


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize(
    "source, defines",
    [
        ("embedding.cu", (("FLOAT", 0), ("KEPT", 1), ("WINDOW", 16))),
        ("kept_gradient.cu", (("FLOAT", 1),)),
    ],
)
def test_kernels_compile_without_spills(target, source, defines):
    for columns, lanes in ((512, 32), (1024, 64)):
        sizes = tuple(sorted((*defines, ("COLUMNS", columns), ("LANES", lanes))))
        found = compiler.compile_kernels(source, sizes, target).resources
        assert len(found) == (4 if source == "embedding.cu" else 1)
        assert not any(taken.spill_bytes for taken in found.values())
