"""Attention over packed rows against padded dense attention in float64; appended rows."""

import dataclasses
import math

import pytest
import torch

from lsq.ops.attention import Append
from lsq.program.values import Rows
from lsq.run.backends import run
from tests.ops.attentions import HEADS, LENGTHS, OTHERS, attention, bias_of, dense, gradient_of
from tests.ops.compare import (
    assert_as_accurate,
    assert_holds,
    compare,
    dropout_of,
    empty,
    on_cpu,
    on_reference,
    refused,
    to_round,
)
from tests.ops.compare import rounded as codes_of
from tests.ops.cuda import DTYPES, EPSILON, compare_cuda, in_dtype
from tests.ops.cuda import run as run_on_cuda
from tests.sampling import first

SHORT, OF_OTHERS = {"lengths": (3, 5, 1), "others": (7, 40, 9)}, {"others": OTHERS}
CASES = [
    {},
    {"coded": False},
    {"causal": True},
    {"dropout": 0.3},
    {"causal": True, "dropout": 0.2, "coded": False},
    {"width": 24},
    {"width": 64},
    {"width": 5, "heads": 3, "dropout": 0.1},
    OF_OTHERS,
    {**OF_OTHERS, "causal": True},
    {**OF_OTHERS, "coded": False, "dropout": 0.2},
    {**SHORT, "causal": True},
    {"heads": 6, "group": 3},
    {**OF_OTHERS, "heads": 4, "group": 4, "causal": True, "dropout": 0.2},
    {"heads": 4, "group": 2, "coded": False, "causal": True},
    {"window": 1, "causal": True},
    {"window": 6, "causal": True, "dropout": 0.2, "heads": 6, "group": 2},
    {"window": 20, "causal": True, "coded": False},
    {**SHORT, "causal": True, "window": 4},
    {"softmax_scale": 1.0, "coded": False},
    {"biased": True},
    {"biased": True, "coded": False, "causal": True, "dropout": 0.2, "heads": 4, "group": 2},
    {"biased": True, "causal": True, "window": 5, "softmax_scale": 0.5},
    {**OF_OTHERS, "biased": True},
]


@pytest.mark.parametrize("options", CASES)
def test_as_accurate_as_dense_attention(options):
    forward = attention(**options)
    found = compare(forward)
    backward = gradient_of(forward)
    for one in (forward.heads.q, forward.heads.k):
        if one.rows.coded is not None:
            one.rows.coded.clipped.zero_()
    gradients = compare(backward)
    made = [end.floats for end in (gradients.dq, gradients.dkv) if end is not None]
    made += [] if gradients.dbias is None else [gradients.dbias]

    def oracle(dtype):
        leaves, context = dense(forward, dtype)
        leaves = {id(one): one for one in leaves}.values()
        total = (context * backward.dcontext).sum()
        return [context.detach(), *torch.autograd.grad(total, leaves)]

    assert_as_accurate([found.out, *made], oracle)


@pytest.mark.parametrize("width, heads", [(8, 2), (5, 3), (24, 1)])
def test_the_context_is_rounded(width, heads):
    rounding = to_round(sum(LENGTHS), heads * width, 0.8, error=True)
    forward = attention(width=width, heads=heads, dropout=0.1, to=rounding)
    made = compare(forward)
    found, unrounded = made.rounded, made.unrounded(run)
    forward.out, forward.rounded = empty(sum(LENGTHS), heads * width), None
    floats = on_cpu(forward).out
    assert torch.equal(unrounded, floats)
    assert_holds(found, rounding.encode(floats))


@pytest.mark.parametrize(
    "options",
    [{}, OF_OTHERS, {"width": 24, "heads": 3}, {"coded": False}, {"heads": 4, "group": 2}],
)
@pytest.mark.parametrize("to_rounded", [False, True])
def test_ends_of_gradients(options, to_rounded, compared):
    """Straight-through masks, clips, sums, rounding."""
    compared(gradient_of(attention(**options, dropout=0.1), to_rounded=to_rounded))


@pytest.mark.parametrize("window", [40, 1000])
def test_a_window_of_all_keys_hides_nothing(window):
    plain, windowed = attention(causal=True), attention(causal=True, window=window)
    share(windowed, plain.heads.q.rows)
    short = slice(0, sum(LENGTHS[:4]))
    assert torch.equal(on_cpu(plain).out[short], on_cpu(windowed).out[short])


def share(forward, rows: Rows) -> None:
    """Read queries, keys and values from these rows."""
    forward.heads.q.rows = forward.heads.k.rows = forward.heads.v.rows = rows


def test_what_a_window_hides_changes_nothing():
    forward = attention((40,), coded=False, causal=True, window=8)
    before = on_cpu(forward).out
    forward.heads.k.rows.floats[:20, 16:] = 1e30
    after = on_cpu(forward).out
    assert torch.equal(after[27:], before[27:]) and not torch.equal(after[26], before[26])


def test_clips_that_learn_by_lsq(compared):
    forward = attention((7, 9))
    share(forward, Rows(coded=codes_of(16, 3 * HEADS * 8, error=True)))
    assert compared(gradient_of(forward)).dq.clip.item() != 0.0


def test_both_passes_drop_the_same():
    """The context is linear in the values, and its gradient uses the same probabilities."""
    forward = attention(coded=False, dropout=0.5)
    backward, hidden = gradient_of(forward), HEADS * 8
    dv = on_cpu(backward).dq.floats[:, 2 * hidden :]
    wanted = (dv * forward.heads.v.rows.floats[:, 2 * hidden :]).sum()
    found = (on_cpu(forward).out * backward.dcontext).sum()
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)
    forward.heads.dropout = dropout_of(0.5, subsequence=3)
    other = on_cpu(forward).out
    assert (other - on_reference(forward).out).abs().max() < 1e-5
    assert ((other * backward.dcontext).sum() - wanted).abs() > 0.1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_the_row_of_a_query_and_the_sentence_of_a_key(value, compared):
    forward = attention(coded=False)
    rows = forward.heads.q.rows.floats
    rows[20, 3] = value
    bad = compared(forward).out.isnan()
    assert bad[20, :8].all() and bad.sum() == 8
    rows[20, 3], rows[20, 2 * 8 + 3] = 0.0, math.nan
    bad = compared(forward).out.isnan()
    assert bad[8:41, :8].all() and bad.sum() == 33 * 8


def test_a_poisoned_scale_poisons_everything(runs):
    forward = attention((7, 9), to=to_round(16, 16, 1.0))
    forward.heads.q.rows.coded.scale.fill_(math.nan)
    for found in runs(forward):
        assert found.rounded.scale.isnan() and not found.rounded.codes.any()


def test_a_mask_does_not_depend_on_what_follows():
    long, short = attention((7, 9, 70), dropout=0.5), attention((7, 9), dropout=0.5)
    share(short, Rows(coded=long.heads.q.rows.coded.bare()))
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
    "lengths, others", [((3, 70, 0, 17), None), (LENGTHS, OTHERS), ((), None), ((0, 0), (0, 0))]
)
@pytest.mark.parametrize("to_rounded", [False, True])
def test_rows_behind_all_sentences_are_zeros(lengths, others, to_rounded, compared):
    """Forward and backward; they give nothing to sums and clips."""
    options = {"others": others, "dropout": 0.1, "causal": others is None}
    rounding = to_round(sum(lengths) + 35, 16, 0.8, error=True)
    forward = attention(lengths, behind=35, **options, to=rounding)
    assert not compared(forward).rounded.codes[-35:].any()
    found = compared(gradient_of(forward, to_rounded=to_rounded))
    for one in filter(None, (found.dq, found.dkv)):
        gradient = one.rounded.codes if to_rounded else one.floats
        assert not gradient[-35:].any() and (not sum(lengths) or gradient[:-35].any())
        assert bool(one.sum.any()) == bool(sum(lengths))


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_an_empty_batch(lengths, compared):
    forward = attention(lengths, to=to_round(0, 16, 1.0))
    assert compared(forward).rounded.scale.item() == pytest.approx(1 / 127)
    found = compared(gradient_of(forward))
    assert not found.dq.sum.any() and not found.dq.clip.any()


def test_more_sentences_than_partial_sums():
    """Sums are added up group by group of sentences, whichever thread ends a group."""
    compare(gradient_of(attention((2, 0, 3) * 50, dropout=0.1)))
    compare(gradient_of(attention((2, 0, 3) * 50, (1, 4, 0) * 50), to_rounded=True))


@pytest.mark.parametrize("others", [None, OTHERS])
def test_limits_of_offsets(others):
    forward = attention(others=others)
    heads = forward.heads
    names = "cu_seqlens", "key_cu_seqlens"
    limits = {f"heads.{name}": getattr(heads, name)[-1].item() for name in names}
    assert forward.limits() == gradient_of(forward).limits() == limits
    heads.bias = bias_of(HEADS)
    assert forward.limits() == limits | {"heads.bias.bucket": 7}


# On CUDA

LONG, FEWER = (3, 70, 0, 17), (3, 20, 2, 0)
"""Two tiles of 64 or three of 32 that are not full, no row, and two fragments."""


def compare_both(dtype=torch.float32, to_rounded=False, **options):
    """Compare attention and its gradient on CUDA."""
    forward = attention(**options)
    compare_cuda(forward, dtype)
    backward = gradient_of(forward, to_rounded=to_rounded)
    if dtype == torch.float32:
        compare_cuda(backward, dtype)
    else:
        compare_narrow(backward, dtype)


def compare_narrow(backward, dtype):
    """Compare a gradient whose sums and codes are of floats that were rounded to `dtype`."""
    floats = {"dq": in_floats(backward.dq), "dkv": backward.dkv and in_floats(backward.dkv)}
    as_floats = dataclasses.replace(backward, **floats)
    wide = on_reference(in_dtype(in_dtype(as_floats, dtype), torch.float32))
    norm = max(end.floats.norm().item() for _, _, end in wide.sides)
    made = compare_cuda(as_floats, dtype, slack=EPSILON[dtype] / 2 * norm)  # five standard errors
    if backward.dq.rounded is None:
        return
    sides = zip(made.sides, run_on_cuda(in_dtype(backward, dtype)).sides, strict=True)
    for (_, _, end), (_, _, found) in sides:
        assert_holds(found.rounded, found.rounded.encode(end.floats.float()))


def in_floats(end):
    """Where a gradient is to be written, in floats."""
    shape = (end.floats if end.rounded is None else end.rounded.codes).shape
    return dataclasses.replace(end, rounded=None, floats=empty(*shape))


@pytest.mark.parametrize(
    "options",
    first(
        [
            {"causal": True, "dropout": 0.3},
            {"others": (3, 97, 2, 0), "heads": 3, "group": 3, "coded": False},
            {"biased": True, "causal": True, "softmax_scale": 1.0},
            {"coded": False, "dropout": 0.2},
            {"others": (3, 97, 2, 0)},
            {"others": (5, 90, 0, 7), "causal": True, "coded": False},
            {"window": 65, "causal": True, "others": (5, 90, 0, 20)},
            {},
            {"others": FEWER, "causal": True},
            {"heads": 4, "group": 2, "causal": True},
            {"window": 9, "causal": True, "dropout": 0.1},
            {"biased": True, "heads": 4, "group": 2, "others": (5, 90, 0, 20)},
            # three turns of every loop over tiles, and of the search for a sentence
            {"lengths": (1, 0, 140, 2, 0, 1, 3), "width": 8, "heads": 1, "coded": False},
            # tiles of keys that a query's window has not reached yet, and those that it has left
            {"lengths": (1, 200, 3), "heads": 2, "group": 2, "causal": True, "window": 40},
        ],
        1,
        6,
    ),
)
def test_in_float32_on_cuda(options):
    compare_both(**{"lengths": LONG} | options)


@pytest.mark.parametrize(
    "options",
    first(
        [
            {"coded": False},
            {"to_rounded": True},
            {"width": 128, "heads": 1},
            {"others": FEWER, "causal": True},
            {"heads": 2, "group": 2, "window": 20, "causal": True},
            {},
            {"biased": True},
        ],
        2,
    ),
)
def test_in_half_precision_on_cuda(options):
    compare_both(torch.bfloat16, lengths=LONG, dropout=0.1, **options)


@pytest.mark.parametrize("width", first([24, 64, 128, 48], 1))
def test_other_widths_on_cuda(width):
    compare_both(lengths=(20, 0, 5), width=width, heads=1, dropout=0.1)


def test_the_context_is_rounded_on_cuda():
    compare_cuda(attention((7, 0, 40), dropout=0.1, to=to_round(47, 16, 0.8, error=True)))


def test_what_kernels_do_not_take_is_refused():
    for width in (12, 136):
        with refused(f"heads of {width} columns.*multiple of 8, up to 128"):
            attention((3,), width=width).cuda()
    forward = attention((3,), (5,))
    forward.heads.q.rows = Rows(floats=torch.zeros(3, 16))
    with refused("queries, keys and values must all be codes, or all floats: round all"):
        forward.cuda()
    operation = append_of(1, 1, 16, codes=False)
    operation.now_floats = operation.now_floats.bfloat16()
    with refused("takes one dtype"):
        operation.cuda()


# Append


def append_of(batch: int, past: int, width: int, *, codes: bool) -> Append:
    """B sentences of P rows, and one row more of each."""
    shapes, size = ((batch * past, width), (batch, width)), (batch * (past + 1), width)
    if codes:
        before, now = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in shapes)
        return Append(before=before, now=now, batch=batch, out=empty(*size, dtype=torch.int8))
    before, now = map(torch.randn, shapes)
    return Append(before_floats=before, now_floats=now, batch=batch, out_floats=empty(*size))


@pytest.mark.parametrize("batch, past, width", [(0, 0, 16), (1, 0, 16), (3, 7, 33), (7, 41, 48)])
@pytest.mark.parametrize("codes, dtype", [(True, torch.float32), *((False, one) for one in DTYPES)])
def test_one_row_more_of_each_sentence(batch, past, width, codes, dtype, compared):
    operation = append_of(batch, past, width, codes=codes)
    found = compared(operation, dtype, exact=codes)
    out = found.out if codes else found.out_floats
    before = found.before if codes else found.before_floats
    now = found.now if codes else found.now_floats
    for own, old, new in zip(out.split(past + 1), before.split(past or 1), now, strict=False):
        assert torch.equal(own[:-1], old[:past]) and torch.equal(own[-1], new)
