"""Embed and its scatter of gradients on CUDA: kernels in the emulator, or on a GPU."""

import pytest
import torch

from lsq.native import compiler
from tests.ops.compare import on_cpu
from tests.ops.cuda import DTYPES, compare_cuda
from tests.ops.test_embedding import PADDING, embed, embed_gradient


@pytest.mark.parametrize("rows", [0, 1, 7, 341])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_both_passes(rows, dtype, dropout):
    forward = embed(rows, 48, dropout)
    compare_cuda(forward, dtype)
    for learned in (False, True):
        compare_cuda(
            embed_gradient(
                torch.randn(rows, 48), forward.tokens, forward.positions, dropout, learned
            ),
            dtype,
        )


def test_wide_rows():
    forward = embed(35, 1040, 0.1)
    compare_cuda(forward)
    compare_cuda(embed_gradient(torch.randn(35, 1040), forward.tokens, forward.positions, 0.1))


def test_rare_words_are_summed_in_the_order_of_the_cpu():
    """Words that occur in one window of sorted occurrences: the same additions, the same bits."""
    tokens = torch.arange(64) // 2 % 32
    operation = embed_gradient(
        torch.randn(64, 48), tokens, dropout=0.1, learned=False, vocabulary=32
    )
    assert torch.equal(compare_cuda(operation).dweight, on_cpu(operation).dweight)


@pytest.mark.parametrize("length", [15, 16, 17, 33, 200])
@pytest.mark.parametrize("first", [0, 1, 15])
def test_a_frequent_word_between_rare_ones(length, first):
    """Runs that begin, end, or fill windows, and those that reach over several."""
    tokens = torch.tensor([3] * first + [4] * length + [6, 6, 7])
    compare_cuda(
        embed_gradient(torch.randn(len(tokens), 48), tokens, torch.zeros_like(tokens), 0.1)
    )


def test_one_word_alone():
    compare_cuda(embed_gradient(torch.randn(671, 48), torch.full((671,), 4)))


def test_padding_and_absent_words_get_nothing():
    found = compare_cuda(
        embed_gradient(torch.full((51, 48), float("nan")), torch.full((51,), PADDING))
    )
    assert not found.dweight.any() and not found.dtable.any()


def test_nan_reaches_its_word_alone():
    gradient = torch.ones(2, 48)
    gradient[1, 3] = float("nan")
    found = compare_cuda(embed_gradient(gradient, torch.tensor([4, 6]), torch.tensor([2, 3])))
    assert found.dweight.isnan().nonzero().tolist() == [[6, 3]]


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
def test_kernels_compile_without_spills(target):
    for columns, lanes in ((512, 32), (1024, 64)):
        defines = (("COLUMNS", columns), ("FLOAT", 1), ("LANES", lanes), ("WINDOW", 16))
        found = compiler.compile_kernels("embedding.cu", defines, target).resources
        assert len(found) == 5 and not any(taken.spill_bytes for taken in found.values())
