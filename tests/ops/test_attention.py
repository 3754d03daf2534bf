"""Attention over packed rows against padded dense attention in float64, forward and backward."""

import math
import resource

import pytest
import torch

from lsq.program.values import Rows
from lsq.run.backends import run
from tests.ops.attentions import (
    HEADS,
    LENGTHS,
    OTHERS,
    assert_zeros_behind,
    attention,
    bias_of,
    dense,
    gradient_of,
)
from tests.ops.compare import (
    assert_accurate,
    assert_holds,
    compare,
    dropout_of,
    empty,
    on_cpu,
    on_reference,
    to_round,
)
from tests.ops.compare import rounded as codes_of

CASES = [
    {},
    {"coded": False},
    {"causal": True},
    {"dropout": 0.3},
    {"causal": True, "dropout": 0.2, "coded": False},
    {"width": 24},
    {"width": 64},
    {"width": 5, "heads": 3, "dropout": 0.1},
    {"others": OTHERS},
    {"others": OTHERS, "causal": True},
    {"others": OTHERS, "coded": False, "dropout": 0.2},
    {"lengths": (3, 5, 1), "others": (7, 40, 9), "causal": True},
    {"heads": 6, "group": 3},
    {"heads": 4, "group": 4, "causal": True, "dropout": 0.2, "others": OTHERS},
    {"heads": 4, "group": 2, "coded": False, "causal": True},
    {"window": 1, "causal": True},
    {"window": 6, "causal": True, "dropout": 0.2, "heads": 6, "group": 2},
    {"window": 20, "causal": True, "coded": False},
    {"lengths": (3, 5, 1), "others": (7, 40, 9), "causal": True, "window": 4},
    {"softmax_scale": 1.0, "coded": False},
    {"biased": True},
    {"biased": True, "coded": False, "causal": True, "dropout": 0.2, "heads": 4, "group": 2},
    {"biased": True, "causal": True, "window": 5, "softmax_scale": 0.5},
    {"biased": True, "others": OTHERS},
]


@pytest.mark.parametrize("options", CASES)
def test_as_accurate_as_dense_attention(options):
    forward = attention(**options)
    found = compare(forward)
    leaves, exact = dense(forward, torch.float64)
    assert_accurate(found.out, exact.detach(), dense(forward, torch.float32)[1].detach())
    backward = gradient_of(forward)
    for one in (forward.heads.q, forward.heads.k):
        if one.rows.coded is not None:
            one.rows.coded.clipped.zero_()
    found = compare(backward)
    single, context = dense(forward, torch.float32)
    wanted, near = (
        torch.autograd.grad(
            (result * backward.dcontext).sum(), {id(one): one for one in of}.values()
        )
        for of, result in ((leaves, exact), (single, context))
    )
    gradients = {
        name: one.floats for name in ("dq", "dkv") if (one := getattr(found, name)) is not None
    }
    if found.dbias is not None:
        gradients["dbias"] = found.dbias
    for (name, one), *values in zip(gradients.items(), wanted, near, strict=True):
        assert_accurate(one, *values, name)


@pytest.mark.parametrize("width, heads", [(8, 2), (5, 3), (24, 1)])
def test_the_context_is_rounded(width, heads):
    rounding = to_round(sum(LENGTHS), heads * width, 0.8, error=True)
    forward = attention(width=width, heads=heads, dropout=0.1, to=rounding)
    made = compare(forward)
    found, unrounded = made.rounded, made.unrounded(run)
    forward.out, forward.rounded = empty(sum(LENGTHS), heads * width), None
    wanted = rounding.encode(on_cpu(forward).out)
    assert torch.equal(unrounded, on_cpu(forward).out)
    assert_holds(found, wanted)


@pytest.mark.parametrize(
    "options",
    [{}, {"others": OTHERS}, {"width": 5, "heads": 3}, {"coded": False}, {"heads": 4, "group": 2}],
)
@pytest.mark.parametrize("to_rounded", [False, True])
def test_ends_of_gradients(options, to_rounded):
    """Straight-through masks, clips, sums, rounding."""
    compare(gradient_of(attention(**options, dropout=0.1), to_rounded=to_rounded))


@pytest.mark.parametrize("window", [40, 1000])
def test_a_window_of_all_keys_hides_nothing(window):
    plain, windowed = attention(causal=True), attention(causal=True, window=window)
    windowed.heads.q.rows = windowed.heads.k.rows = windowed.heads.v.rows = plain.heads.q.rows
    short = slice(0, sum(LENGTHS[:4]))
    assert torch.equal(on_cpu(plain).out[short], on_cpu(windowed).out[short])


def test_what_a_window_hides_changes_nothing():
    forward = attention((40,), coded=False, causal=True, window=8)
    before = on_cpu(forward).out
    forward.heads.k.rows.floats[:20, 16:] = 1e30
    assert torch.equal(on_cpu(forward).out[27:], before[27:])
    assert not torch.equal(on_cpu(forward).out[26], before[26])


def test_clips_that_learn_by_lsq():
    forward = attention()
    heads = forward.heads
    heads.q.rows = heads.k.rows = heads.v.rows = Rows(
        coded=codes_of(sum(LENGTHS), 3 * HEADS * 8, error=True)
    )
    assert compare(gradient_of(forward)).dq.clip.item() != 0.0


def test_both_passes_drop_the_same():
    """The context is linear in the values, and its gradient uses the same probabilities."""
    forward = attention(coded=False, dropout=0.5)
    backward = gradient_of(forward)
    hidden = HEADS * 8
    dv, values = (
        on_cpu(backward).dq.floats[:, 2 * hidden :],
        forward.heads.v.rows.floats[:, 2 * hidden :],
    )
    torch.testing.assert_close(
        (on_cpu(forward).out * backward.dcontext).sum(), (dv * values).sum(), atol=1e-4, rtol=1e-5
    )
    forward.heads.dropout = dropout_of(0.5, subsequence=3)
    assert (on_cpu(forward).out - on_reference(forward).out).abs().max() < 1e-5
    assert ((on_cpu(forward).out * backward.dcontext).sum() - (dv * values).sum()).abs() > 0.1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_in_a_query_stays_in_its_row(value):
    forward = attention(coded=False)
    forward.heads.q.rows.floats[20, 3] = value
    bad = compare(forward).out.isnan()
    assert bad[20, :8].all() and bad.sum() == 8


def test_nan_in_a_key_stays_in_its_sentence():
    forward = attention(coded=False)
    forward.heads.k.rows.floats[20, 2 * 8 + 3] = math.nan
    bad = compare(forward).out.isnan()
    assert bad[8:41, :8].all() and bad.sum() == 33 * 8


def test_a_poisoned_scale_poisons_everything():
    forward = attention(to=to_round(sum(LENGTHS), 16, 1.0))
    forward.heads.q.rows.coded.scale.fill_(math.nan)
    found = on_cpu(forward)
    assert found.rounded.scale.isnan() and not found.rounded.codes.any()


def test_a_mask_does_not_depend_on_what_follows():
    long, short = attention((7, 9, 70), dropout=0.5), attention((7, 9), dropout=0.5)
    short.heads.q.rows = short.heads.k.rows = short.heads.v.rows = Rows(
        coded=long.heads.q.rows.coded.bare()
    )
    short.heads.q.rows.coded.codes = long.heads.q.rows.coded.codes[:16]
    assert torch.equal(compare(short).out, compare(long).out[:16])


def test_extreme_scores_do_not_overflow():
    forward = attention(coded=False)
    forward.heads.q.rows.floats.mul_(1000.0)
    assert compare(forward).out.isfinite().all()


def test_no_keys_at_all():
    forward = attention((3, 2), (0, 0))
    assert not compare(forward).out.any()
    assert not compare(gradient_of(forward)).dkv.sum.any()


@pytest.mark.parametrize(
    "lengths, others", [(LENGTHS, None), (LENGTHS, OTHERS), ((), None), ((0, 0), (0, 0))]
)
@pytest.mark.parametrize("to_rounded", [False, True])
def test_rows_behind_all_sentences_are_zeros(lengths, others, to_rounded):
    assert_zeros_behind(compare, lengths, others, to_rounded)


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_an_empty_batch(lengths):
    forward = attention(lengths, to=to_round(0, 16, 1.0))
    assert compare(forward).rounded.scale.item() == pytest.approx(1 / 127)
    found = compare(gradient_of(forward))
    assert not found.dq.sum.any() and not found.dq.clip.any()


def test_results_do_not_depend_on_threads():
    forward = attention(dropout=0.1)
    backward = gradient_of(forward, to_rounded=True)
    results, threads = [], torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append((on_cpu(forward), on_cpu(backward)))
    torch.set_num_threads(threads)
    for one, other in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.outputs, other.outputs, strict=True))


def test_more_sentences_than_partial_sums():
    """Sums are added up group by group of sentences, whichever thread ends a group."""
    lengths = (2, 0, 3) * 50
    compare(gradient_of(attention(lengths, dropout=0.1)))
    compare(gradient_of(attention(lengths, (1, 4, 0) * 50), to_rounded=True))


def test_long_sentences_take_little_memory():
    """4,096 tokens: a matrix of queries times keys would take 64 MiB."""
    forward = attention((4096,), width=8, heads=1, causal=True)
    on_cpu(attention((64,), width=8, heads=1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    on_cpu(forward)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024


@pytest.mark.parametrize("others", [None, OTHERS])
def test_limits_of_offsets(others):
    forward = attention(others=others)
    heads = forward.heads
    limits = {
        "heads.cu_seqlens": heads.cu_seqlens[-1].item(),
        "heads.key_cu_seqlens": heads.key_cu_seqlens[-1].item(),
    }
    assert forward.limits() == gradient_of(forward).limits() == limits
    heads.bias = bias_of(HEADS)
    assert forward.limits() == limits | {"heads.bias.bucket": 7}
