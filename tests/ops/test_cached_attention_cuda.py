"""CachedAttention on CUDA: kernels in the emulator, or on a GPU."""

import math

import pytest
import torch

from lsq.native.compiler import compile_kernels
from lsq.ops import cached_attention_cuda
from tests.ops.cuda import compare_cuda, run
from tests.ops.test_cached_attention import example


def compared(operation):
    """Compared with the reference; the cache exactly."""
    cache = operation.cache.clone()
    for row, list_number in enumerate(operation.owned.tolist() if operation.appends else []):
        count = int(operation.lengths[list_number])
        if count:
            cache[operation.lists[list_number, count - 1]] = operation.queries.codes[
                row, operation.columns :
            ]
    found = compare_cuda(operation)
    assert torch.equal(found.cache, cache)
    return found


def turns():
    """Three turns of a block over keys, and of a block that joins three others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached_attention_cuda, "LEAST", 512)
        compared(example(1, 1, 64, 385, appends=False, lengths=[385]))
        patch.setattr(cached_attention_cuda, "LEAST", 16)
        compared(example(2, 1, 16, 48, appends=True, lengths=[48, 40]))


@pytest.mark.parametrize(
    "rows, heads, width, capacity",
    [
        (1, 1, 16, 1),
        (3, 4, 8, 7),
        (5, 2, 64, 41),
        (2, 3, 40, 19),
        (4, 2, 128, 33),
        (130, 2, 24, 3),
        (2, 1, 120, 37),
    ],
)
@pytest.mark.parametrize("appends", [False, True])
def test_against_the_reference(rows, heads, width, capacity, appends):
    compared(example(rows, heads, width, capacity, appends=appends))


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("lengths", [[1, 16, 17], [63, 0, 64]])
def test_blocks_share_long_lists(appends, lengths, monkeypatch):
    monkeypatch.setattr(cached_attention_cuda, "LEAST", 16)
    operation = example(3, 2, 24, 64, appends=appends, lengths=lengths)
    [(shape, _)] = operation.cuda_scratch()
    assert shape == (6, 4, 28)
    compared(operation)


def test_long_lists():
    compared(example(1, 2, 64, 1031, appends=True, lengths=[1031]))


def test_blocks_share_lists_where_there_are_few_rows():
    for rows, capacity, parts in [
        (1, 256, 0),
        (1, 257, 2),
        (1, 10_000, 40),
        (64, 10_000, 4),
        (128, 10_000, 2),
        (257, 9999, 0),
    ]:
        operation = example(rows, 2, 8, 1, appends=False)
        operation.lists = torch.empty(1, capacity, dtype=torch.int64)
        found = operation.cuda_scratch()
        assert (found[0][0][1] if found else 0) == parts


def test_rows_that_share_lists():
    operation = example(6, 2, 16, 9, appends=False, lengths=[9, 3])
    operation.lists, operation.lengths = operation.lists[:2].contiguous(), operation.lengths[:2]
    operation.owned = torch.tensor([1, 1, 0, 1, 0, 0])
    compared(operation)


@pytest.mark.parametrize("least", [2, 256])
def test_an_empty_list_gives_zeros(least, monkeypatch):
    monkeypatch.setattr(cached_attention_cuda, "LEAST", least)
    found = compared(example(3, 2, 16, 5, appends=True, lengths=[2, 0, 5]))
    assert not found.context.codes[1].any() and found.context.codes[0].any()


def test_scores_of_the_largest_codes():
    """Sums that no float32 holds one by one, and keys whose probability is 0."""
    operation = example(2, 1, 128, 5, appends=False, lengths=[5])
    operation.queries.codes.fill_(127)
    operation.cache[:, :128] = 127
    operation.cache[operation.lists[0, 2], :128] = -127
    compared(operation)


@pytest.mark.parametrize("least", [2, 256])
def test_nan_poisons_the_scale(least, monkeypatch):
    monkeypatch.setattr(cached_attention_cuda, "LEAST", least)
    for started in (False, True):
        operation = example(2, 2, 16, 5, appends=False)
        operation.context.started = started
        operation.cache_scale.fill_(math.nan)
        found = run(operation)
        assert found.context.scale.isnan() and not found.context.codes.any()


def test_without_rows_there_is_a_scale():
    operation = example(1, 2, 16, 5, appends=False)
    operation.queries.codes, operation.owned = operation.queries.codes[:0], operation.owned[:0]
    operation.context.codes.shape = (0, 32)
    assert run(operation).context.scale.item() == pytest.approx(0.5 / 127)


def test_heads_that_kernels_do_not_have_are_refused():
    for width in (12, 136):
        with pytest.raises(ValueError, match=f"heads of {width} columns.*multiple of 8, up to 128"):
            example(1, 2, width, 3, appends=False).cuda()


@pytest.mark.thorough
def test_kernels_spill_no_registers():
    for width in (8, 40, 64, 120, 128):
        for target in ("sm_80", "sm_90a", "sm_120"):
            defines = (("LEAST", cached_attention_cuda.LEAST), ("STARTED", 1), ("WIDTH", width))
            for taken in compile_kernels("cached_attention.cu", defines, target).resources.values():
                assert not taken.spill_bytes, f"{width}, {target}"
