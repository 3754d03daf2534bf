"""embedding and its scatter of gradients on CUDA: kernels in the emulator, or on a GPU."""

import pytest
import torch

from tests.ops.compare import KEY, compare
from tests.ops.cuda import compare_cuda
from tests.ops.test_embedding import BACKWARD, FORWARD, PADDING, POSITIONS, VOCABULARY, case

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def options_of(dropout=0.1, learned=True):
    return FORWARD | {"dropout": dropout, "learned": learned}


@pytest.mark.parametrize("batch, time", [(1, 1), (7, 1), (1, 41), (11, 31)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_forward(batch, time, dtype, dropout):
    compare_cuda("embedding", *case(batch, time, 48), KEY, dtype=dtype, floats=(0,), **options_of(dropout))


@pytest.mark.parametrize("weight_dtype, table_dtype", [(DTYPES[1], DTYPES[1]), (DTYPES[0], DTYPES[1])])
def test_tables_in_half_precision(weight_dtype, table_dtype):
    tokens, places, weight, table = case(3, 7, 48)
    tables = weight.to(weight_dtype), table.to(table_dtype)
    compare_cuda("embedding", tokens, places, *tables, KEY, dtype=DTYPES[1], floats=(0,), **options_of())


@pytest.mark.parametrize("batch, time", [(1, 1), (7, 1), (1, 41), (11, 31)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("learned", [False, True])
def test_backward(batch, time, dtype, dropout, learned):
    tokens, places, *_ = case(batch, time, 48)
    gradient = torch.randn(batch * time, 48).to(dtype)
    options = options_of(dropout, learned) | BACKWARD
    compare_cuda("embedding_backward", gradient, tokens, places, KEY, dtype=dtype, **options)


def test_wide_rows():
    tokens, places, weight, table = case(5, 7, 1040)
    compare_cuda("embedding", tokens, places, weight, table, KEY, **options_of())
    gradient = torch.randn(35, 1040)
    compare_cuda("embedding_backward", gradient, tokens, places, KEY, **options_of(), **BACKWARD)


def test_rare_words_are_summed_in_the_order_of_the_cpu():
    """Words that occur in one window of sorted occurrences: the same additions, the same bits."""
    tokens = torch.arange(64).view(8, 8) // 2 % 32
    gradient = torch.randn(64, 48)
    options = options_of(learned=False) | {"vocabulary": 32, "positions": 1}
    dweight, _ = compare_cuda("embedding_backward", gradient, tokens, tokens, KEY, **options)
    wanted, _ = compare("embedding_backward", gradient, tokens, tokens, KEY, **options)
    assert torch.equal(dweight, wanted)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48, 200])
@pytest.mark.parametrize("first", [0, 1, 15])
def test_a_frequent_word_between_rare_ones(length, first):
    """Runs that begin, end, or fill windows, and those that reach over several."""
    tokens = torch.tensor([[3] * first + [4] * length + [6, 6, 7]])
    gradient = torch.randn(tokens.numel(), 48)
    places = torch.zeros_like(tokens)
    compare_cuda("embedding_backward", gradient, tokens, places, KEY, **options_of(), **BACKWARD)


def test_one_word_alone():
    tokens = torch.full((11, 61), 4)
    gradient = torch.randn(tokens.numel(), 48)
    compare_cuda("embedding_backward", gradient, tokens, tokens, KEY, **options_of(0.0), **BACKWARD)


def test_padding_and_absent_words_get_nothing():
    tokens = torch.full((3, 17), PADDING)
    gradient = torch.full((51, 48), float("nan"))
    dweight, dtable = compare_cuda("embedding_backward", gradient, tokens, tokens, KEY, **options_of(), **BACKWARD)
    assert not dweight.any() and not dtable.any()


def test_nan_reaches_its_word_alone():
    gradient = torch.ones(2, 48)
    gradient[1, 3] = float("nan")
    dweight, _ = compare_cuda(
        "embedding_backward", gradient, torch.tensor([[4, 6]]), torch.tensor([[2, 3]]), KEY,
        **options_of(0.0), **BACKWARD,
    )
    assert dweight.isnan().nonzero().tolist() == [[6, 3]]


def test_an_empty_batch():
    tokens, places, weight, table = case(0, 7, 48)
    compare_cuda("embedding", tokens, places, weight, table, KEY, **options_of())
    dweight, dtable = compare_cuda(
        "embedding_backward", torch.empty(0, 48), tokens, places, KEY, **options_of(), **BACKWARD
    )
    assert dweight.shape == (VOCABULARY, 48) and dtable.shape == (POSITIONS, 48)
    assert not dweight.any() and not dtable.any()
