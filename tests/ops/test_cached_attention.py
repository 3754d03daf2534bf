"""CachedAttention: lists in any order, shared and empty ones, and keys that a row brings."""

import math

import pytest
import torch

from lsq.ops import cached_attention_cuda
from lsq.ops.attention import Attention, Heads, Projected
from lsq.ops.cached_attention import CachedAttention
from lsq.program.values import Coded, Rows
from tests.ops.compare import format_of, on_cpu, refused, rounded, to_round
from tests.ops.cuda import compare_cuda, run


def example(rows, heads, width, capacity, *, appends, lengths=None):
    """Rows with lists of their own where they append, else with shared lists."""
    torch.manual_seed(rows + width)
    hidden, lists = heads * width, rows if appends else max(1, rows // 2)
    places = rows * capacity + 5
    lengths = torch.randint(1, capacity + 1, (lists,)) if lengths is None else torch.tensor(lengths)
    return CachedAttention(
        queries=rounded(rows, hidden * (3 if appends else 1)).bare(),
        cache=torch.randint(-127, 128, (places, 2 * hidden), dtype=torch.int8),
        cache_scale=torch.tensor([0.011]),
        lists=torch.randperm(places)[: lists * capacity].view(lists, capacity),
        lengths=lengths,
        owned=torch.arange(rows) if appends else torch.randint(0, lists, (rows,)),
        appends=appends,
        heads=heads,
        context=to_round(rows, hidden, 0.5, clipped=False),
    )


def same(compared, operation):
    """Compared with the reference; the cache exactly."""
    cache = operation.cache.clone()
    for row, owned in enumerate(operation.owned.tolist() if operation.appends else []):
        if count := int(operation.lengths[owned]):
            place = operation.lists[owned, count - 1]
            cache[place] = operation.queries.codes[row, operation.columns :]
    found = compared(operation)
    assert torch.equal(found.cache, cache)
    return found


def turns():
    """Three turns of a block over keys, and of a block that joins three others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached_attention_cuda, "LEAST", 512)
        same(compare_cuda, example(1, 1, 64, 385, appends=False, lengths=[385]))
        patch.setattr(cached_attention_cuda, "LEAST", 16)
        same(compare_cuda, example(2, 1, 16, 48, appends=True, lengths=[48, 40]))


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
def test_against_the_reference(rows, heads, width, capacity, appends, compared):
    same(compared, example(rows, heads, width, capacity, appends=appends))


@pytest.mark.parametrize("least", [2, 256])
def test_an_empty_list_gives_zeros(least, compared, monkeypatch):
    monkeypatch.setattr(cached_attention_cuda, "LEAST", least)
    found = same(compared, example(3, 2, 16, 5, appends=True, lengths=[2, 0, 5]))
    assert not found.context.codes[1].any() and found.context.codes[0].any()


def test_codes_are_those_of_attention_over_packed_rows():
    operation = example(4, 8, 64, 30, appends=False, lengths=[30, 17])
    hidden, count = 512, [30, 17]
    memory = torch.cat(
        [operation.cache[places[:n]] for places, n in zip(operation.lists, count, strict=True)]
    )
    operation.owned = torch.tensor([0, 0, 1, 1])
    keys = Rows(coded=Coded(format=format_of(), codes=memory, scale=operation.cache_scale))
    heads = Heads(
        q=Projected(rows=Rows(coded=operation.queries), column=0),
        k=Projected(rows=keys, column=0),
        v=Projected(rows=keys, column=hidden),
        cu_seqlens=torch.tensor([0, 2, 4], dtype=torch.int32),
        key_cu_seqlens=torch.tensor([0, 30, 47], dtype=torch.int32),
        count=8,
        width=64,
        causal=False,
    )
    whole = on_cpu(Attention(heads=heads, rounded=to_round(4, hidden, 0.5, clipped=False)))
    assert torch.equal(on_cpu(operation).context.codes, whole.rounded.codes)


@pytest.mark.parametrize("least", [2, 256])
@pytest.mark.parametrize("started", [False, True])
def test_nan_poisons_the_scale(least, started, runs, monkeypatch):
    monkeypatch.setattr(cached_attention_cuda, "LEAST", least)
    operation = example(2, 2, 16, 5, appends=False)
    operation.context.started = started
    operation.cache_scale.fill_(math.nan)
    for found in runs(operation):
        assert found.context.scale.isnan() and not found.context.codes.any()


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("lengths", [[1, 16, 17], [63, 0, 64]])
def test_blocks_share_long_lists_on_cuda(appends, lengths, monkeypatch):
    monkeypatch.setattr(cached_attention_cuda, "LEAST", 16)
    operation = example(3, 2, 24, 64, appends=appends, lengths=lengths)
    [(shape, _)] = operation.cuda_scratch()
    assert shape == (6, 4, 28)
    same(compare_cuda, operation)


def test_long_lists_on_cuda():
    same(compare_cuda, example(1, 2, 64, 1031, appends=True, lengths=[1031]))


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


def test_rows_that_share_lists_on_cuda():
    operation = example(6, 2, 16, 9, appends=False, lengths=[9, 3])
    operation.lists, operation.lengths = operation.lists[:2].contiguous(), operation.lengths[:2]
    operation.owned = torch.tensor([1, 1, 0, 1, 0, 0])
    same(compare_cuda, operation)


def test_scores_of_the_largest_codes_on_cuda():
    """Sums that no float32 holds one by one, and keys whose probability is 0."""
    operation = example(2, 1, 128, 5, appends=False, lengths=[5])
    operation.queries.codes.fill_(127)
    operation.cache[:, :128] = 127
    operation.cache[operation.lists[0, 2], :128] = -127
    same(compare_cuda, operation)


def test_without_rows_there_is_a_scale_on_cuda():
    operation = example(1, 2, 16, 5, appends=False)
    operation.queries.codes, operation.owned = operation.queries.codes[:0], operation.owned[:0]
    operation.context.codes.shape = (0, 32)
    assert run(operation).context.scale.item() == pytest.approx(0.5 / 127)


def test_heads_that_kernels_do_not_have_are_refused():
    for width in (12, 136):
        with refused(f"heads of {width} columns.*multiple of 8, up to 128"):
            example(1, 2, width, 3, appends=False).cuda()
