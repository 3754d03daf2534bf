"""CachedAttention: lists in any order, shared and empty ones, and keys that a row brings along."""

import pytest
import torch

from lsq.ops.attention import Attention
from lsq.ops.cached_attention import CachedAttention
from lsq.ops.heads import Heads, Projected
from lsq.program.values import Coded, Rows
from tests.ops.compare import compare, format_of, on_cpu, rounded, to_round


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


def run(operation):
    """Compared with the reference; both begin with the same cache."""
    before = operation.cache.clone()
    fresh = operation.bind(lambda one: one)
    fresh.cache = before.clone()
    expected = fresh.reference()["cache"]
    found = compare(operation)
    assert torch.equal(found.cache, expected)
    return found


@pytest.mark.parametrize(
    "rows, heads, width, capacity",
    [(1, 1, 16, 1), (3, 4, 8, 7), (5, 2, 64, 41), (2, 3, 40, 19), (4, 2, 128, 33), (130, 2, 24, 3)],
)
@pytest.mark.parametrize("appends", [False, True])
def test_against_the_reference(rows, heads, width, capacity, appends):
    run(example(rows, heads, width, capacity, appends=appends))


def test_an_empty_list_gives_zeros():
    found = run(example(3, 2, 16, 5, appends=True, lengths=[2, 0, 5]))
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


def test_nan_poisons_the_scale():
    operation = example(2, 2, 16, 5, appends=False)
    operation.cache_scale.fill_(float("nan"))
    assert run(operation).context.scale.isnan()
