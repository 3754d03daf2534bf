"""Attention over packed rows against padded dense attention in float64, forward and backward."""

import math
import resource

import pytest
import torch

from lsq.backends import run
from lsq.ops.attention import Attention, AttentionGradient, HeadsGradient
from lsq.ops.heads import Heads, PositionBias, Projected
from lsq.program.values import Rows
from lsq.quant import random
from tests.ops.compare import KEY, assert_accurate, compare, dropout_of, empty, on_cpu, on_reference, to_round
from tests.ops.compare import gradient_to_round as to_round_by_row
from tests.ops.compare import rounded as codes_of

LENGTHS = (1, 7, 0, 33, 64, 5)
OTHERS = (3, 40, 2, 0, 70, 1)
"""Keys of the same sentences in cross-attention."""
HEADS = 2


def offsets(lengths) -> torch.Tensor:
    """Where sentences of those lengths begin."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def values(rows: int, columns: int, coded: bool) -> Rows:
    """Codes or floats of about unit size; floats that bfloat16 has, too."""
    return Rows(coded=codes_of(rows, columns)) if coded else Rows(floats=torch.randn(rows, columns).bfloat16().float())


def bias_of(heads: int) -> PositionBias:
    """Of 7 buckets for distances up to 9."""
    bucket = torch.arange(-9, 10).clamp(-6, 6).div(2, rounding_mode="floor") + 3
    return PositionBias(table=torch.randn(7, heads), bucket=bucket)


def attention(
    lengths=LENGTHS, others=None, *, width=8, coded=True, causal=False, dropout=0.0, heads=HEADS, group=1, window=0,
    share=0.0, biased=False, behind=0, to=None,
):  # fmt: skip
    """Self-attention, or cross-attention to the keys of `others`; `to`: a Coded for the context, else floats.

    So many rows of queries and of keys stand `behind` all sentences.
    """
    hidden, of_keys, rows = heads * width, heads * width // group, sum(lengths) + behind
    if others is None:
        q = k = values(rows, hidden + 2 * of_keys, coded)
    else:
        q, k = values(rows, hidden, coded), values(sum(others) + behind, 2 * of_keys, coded)
    keys, first = (lengths, hidden) if others is None else (others, 0)
    read = Heads(
        q=Projected(rows=q, column=0), k=Projected(rows=k, column=first), v=Projected(rows=k, column=first + of_keys),
        starts=offsets(lengths), key_starts=offsets(keys), count=heads, group=group, width=width, causal=causal,
        window=window, dropout=dropout_of(dropout), share=share, bias=bias_of(heads) if biased else None,
    )  # fmt: skip
    return Attention(
        heads=read, log_sum=empty(rows, heads), out=empty(rows, hidden) if to is None else None, rounded=to
    )


def gradient_of(forward: Attention, *, to_rounded=False) -> AttentionGradient:
    """Its gradient, as floats or rounded, with all sums; `forward` is run by the reference for its log_sum."""
    heads, asked = forward.heads, []
    for one in (heads.q, heads.k)[: 1 + (heads.q.rows.tensor is not heads.k.rows.tensor)]:
        shape = one.rows.tensor.shape
        gradient = {"rounded": to_round_by_row(*shape)} if to_rounded else {"floats": empty(*shape)}
        clip = empty(1) if one.rows.coded is not None else None
        asked.append(HeadsGradient(**gradient, sum=empty(shape[1]), clip=clip))
    return AttentionGradient(
        dcontext=torch.randn(heads.rows, heads.count * heads.width), heads=heads,
        log_sum=on_reference(forward).log_sum, dbias=heads.bias and empty(*heads.bias.table.shape),
        **dict(zip(("dq", "dkv"), asked, strict=False)),
    )  # fmt: skip


def dense(operation, dtype):
    """Padded [B, N, T, S] attention on the decoded values: leaves (of q, of k, of biases), context."""
    heads = operation.heads
    leaves = [(one.rows.tensor.to(dtype) * float(one.rows.scale)).requires_grad_() for one in (heads.q, heads.k)]
    if heads.q.rows.tensor is heads.k.rows.tensor:
        leaves[1] = leaves[0]
    if heads.bias is not None:
        leaves.append(heads.bias.table.to(dtype).requires_grad_())
    of_q, of_k = (one.diff().tolist() for one in (heads.starts, heads.key_starts))
    width = heads.width

    def padded(rows, lengths, column, count):
        sentences = rows[:, column : column + count * width].split(lengths)
        whole = torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True)
        return whole.unflatten(2, (-1, width)).transpose(1, 2)

    q = padded(leaves[0], of_q, heads.q.column, heads.count)
    k, v = (padded(leaves[1], of_k, one.column, heads.count // heads.group) for one in (heads.k, heads.v))
    shared = torch.arange(heads.count) // heads.group
    k, v = k[:, shared], v[:, shared]
    scores = q @ k.transpose(2, 3) * (heads.share or width**-0.5)
    query, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    if heads.bias is not None:
        distances = [key - query - (keys - queries) for queries, keys in zip(of_q, of_k, strict=True)]
        places = (torch.stack(distances) + 9).clamp(0, 18)
        scores = scores + leaves[-1][heads.bias.bucket[places]].permute(0, 3, 1, 2)
    seen = torch.stack([
        (key < keys) & ((key <= query + (keys - queries)) | torch.tensor(not heads.causal))
        & (key > query + (keys - queries) - (heads.window or 10**6))
        for queries, keys in zip(of_q, of_k, strict=True)
    ])[:, None]  # fmt: skip
    scores = scores.masked_fill(~seen, -math.inf)
    blind = ~seen.any(dim=3, keepdim=True)
    probabilities = scores.masked_fill(blind, 0.0).softmax(dim=3) * ~blind
    if heads.dropout is not None:
        row = torch.arange(sum(of_q))[:, None, None] * heads.count + torch.arange(heads.count)[:, None]
        element = row * 2**31 + torch.arange(k.shape[2])
        dropout, ones = heads.dropout, torch.ones(element.shape)
        mask = random.dropout(ones, dropout.probability, KEY, dropout.subsequence, element)
        whole = torch.nn.utils.rnn.pad_sequence(mask.split(of_q), batch_first=True)
        probabilities = probabilities * whole.transpose(1, 2)
    context = (probabilities @ v).transpose(1, 2).flatten(2)
    return leaves, torch.cat([one[:length] for one, length in zip(context, of_q, strict=True)])


CASES = [
    {}, {"coded": False}, {"causal": True}, {"dropout": 0.3}, {"causal": True, "dropout": 0.2, "coded": False},
    {"width": 24}, {"width": 64}, {"width": 5, "heads": 3, "dropout": 0.1}, {"others": OTHERS},
    {"others": OTHERS, "causal": True}, {"others": OTHERS, "coded": False, "dropout": 0.2},
    {"lengths": (3, 5, 1), "others": (7, 40, 9), "causal": True},
    {"heads": 6, "group": 3}, {"heads": 4, "group": 4, "causal": True, "dropout": 0.2, "others": OTHERS},
    {"heads": 4, "group": 2, "coded": False, "causal": True}, {"window": 1, "causal": True},
    {"window": 6, "causal": True, "dropout": 0.2, "heads": 6, "group": 2},
    {"window": 20, "causal": True, "coded": False},
    {"lengths": (3, 5, 1), "others": (7, 40, 9), "causal": True, "window": 4}, {"share": 1.0, "coded": False},
    {"biased": True}, {"biased": True, "coded": False, "causal": True, "dropout": 0.2, "heads": 4, "group": 2},
    {"biased": True, "causal": True, "window": 5, "share": 0.5}, {"biased": True, "others": OTHERS},
]  # fmt: skip


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
        torch.autograd.grad((result * backward.dcontext).sum(), {id(one): one for one in of}.values())
        for of, result in ((leaves, exact), (single, context))
    )
    gradients = {name: one.floats for name in ("dq", "dkv") if (one := getattr(found, name)) is not None}
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
    assert all(map(torch.equal, (found.codes, found.scale, found.clipped, found.error), wanted))


@pytest.mark.parametrize("options", [
    {}, {"others": OTHERS}, {"width": 5, "heads": 3}, {"coded": False}, {"heads": 4, "group": 2},
])  # fmt: skip
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
    heads.q.rows = heads.k.rows = heads.v.rows = Rows(coded= codes_of(sum(LENGTHS), 3 * HEADS * 8, error=True))
    assert compare(gradient_of(forward)).dq.clip.item() != 0.0


def test_both_passes_drop_the_same():
    """The context is linear in the values, and its gradient uses the same probabilities."""
    forward = attention(coded=False, dropout=0.5)
    backward = gradient_of(forward)
    hidden = HEADS * 8
    dv, values = on_cpu(backward).dq.floats[:, 2 * hidden :], forward.heads.v.rows.floats[:, 2 * hidden :]
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
    short.heads.q.rows = short.heads.k.rows = short.heads.v.rows = Rows(coded=long.heads.q.rows.coded.bare())
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


def assert_zeros_behind(run, lengths, others, to_rounded):
    """Rows behind all sentences give zeros forward and backward, and nothing to sums and clips."""
    options = {"others": others, "dropout": 0.1, "causal": others is None}
    forward = attention(lengths, behind=35, **options, to=to_round(sum(lengths) + 35, 16, 0.8, error=True))
    assert not run(forward).rounded.codes[-35:].any()
    found = run(gradient_of(forward, to_rounded=to_rounded))
    for one in filter(None, (found.dq, found.dkv)):
        gradient = one.rounded.codes if to_rounded else one.floats
        assert not gradient[-35:].any() and (not sum(lengths) or gradient[:-35].any())
        assert bool(one.sum.any()) == bool(sum(lengths))


@pytest.mark.parametrize("lengths, others", [(LENGTHS, None), (LENGTHS, OTHERS), ((), None), ((0, 0), (0, 0))])
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
    limits = {"heads.starts": heads.starts[-1].item(), "heads.key_starts": heads.key_starts[-1].item()}
    assert forward.limits() == gradient_of(forward).limits() == limits
    heads.bias = bias_of(HEADS)
    assert forward.limits() == limits | {"heads.bias.bucket": 7}
