"""Attention on the CPU with many blocks of queries and keys, and in every library."""

import math
import resource

import pytest
import torch

from lsq.native import loader, tiles
from tests.native.levels import LEVELS, library_of
from tests.ops.attentions import attention, gradient_of
from tests.ops.compare import compare, empty, on_cpu
from tests.sampling import in_turn

LONG, MEMORY = (530, 3), (3, 1100)
"""Two blocks of keys; three, of which queries of the first sentence see none."""
CASES = [
    {},
    {"causal": True, "dropout": 0.2},
    {"others": MEMORY, "dropout": 0.1},
    {"others": MEMORY, "causal": True},
    {"coded": False, "causal": True},
    {"width": 40, "heads": 1},
    {"heads": 4, "group": 2, "causal": True, "dropout": 0.1},
    {"window": 40, "causal": True},
    {"window": 600, "causal": True, "others": (530, 1100), "dropout": 0.1},
    {"window": 513, "causal": True, "coded": False, "heads": 4, "group": 4},
    {"biased": True, "causal": True},
    {"biased": True, "coded": False, "others": MEMORY, "dropout": 0.1},
    {"lengths": (1030,), "causal": True, "heads": 1},
    {"lengths": (1024,), "heads": 1, "dropout": 0.1},
]


WAYS = [
    *((LEVELS[0], kind) for kind in tiles.usable()),
    *((level, tiles.PLAIN) for level in LEVELS[1:]),
]
"""Each library that runs here, with each kind of instructions that the first can use."""


@pytest.fixture(params=WAYS, ids="-".join)
def level(request):
    """Runs the loops of each library, by each kind of instructions."""
    name, kind = request.param
    with library_of(name):
        loader.call("lsq_limit_attention", tiles.INSTRUCTIONS[kind])
        yield
        loader.call("lsq_limit_attention", max(tiles.INSTRUCTIONS.values()))


@pytest.mark.parametrize("options, level", in_turn(CASES, WAYS, 1), indirect=["level"])
def test_long_sentences(options, level):
    forward = attention(**{"lengths": LONG} | options)
    compare(forward)
    compare(gradient_of(forward))


@pytest.mark.parametrize(
    "options", [{}, {"dropout": 0.1, "causal": True}, {"coded": False}, {"width": 64}]
)
def test_short_sentences(options, level):
    forward = attention((1, 7, 0, 33), **options)
    compare(forward)
    compare(gradient_of(forward))


def test_products_of_codes_are_exact(level):
    """With one key, the log_sum is the score; the sum of 128 squares of 127 takes 21 bits."""
    forward = attention((1,) * 40, width=128, heads=2)
    heads = forward.heads
    columns = (slice(one.column, one.column + 256) for one in (heads.q, heads.k))
    q, k = (heads.q.rows.tensor[:, one].view(40, 2, 128).double() for one in columns)
    q[:3], k[:3] = 127, 127
    heads.q.rows.tensor[:3, :512] = 127
    factor = heads.q.rows.scale * heads.k.rows.scale * torch.tensor(128**-0.5)
    assert torch.equal(on_cpu(forward).log_sum, (q * k).sum(dim=2).float() * factor)


def test_many_small_probabilities_count(level):
    """2,047 keys of 1 % of the probability, with values that make 40 % of the context."""
    forward = attention((2048,), width=16, heads=1)
    heads = forward.heads
    codes = heads.q.rows.coded.codes
    codes[:, :32], codes[:, 32:] = 0, 127
    codes[:, 0], codes[0, 16], codes[0, 32:] = 127, 127, 2
    scale = (12.2 * 16**0.5) ** 0.5 / 127
    heads.q.rows.coded.scale.fill_(scale)
    share = 2047 * math.exp(-12.2)
    wanted = torch.full((2048, 16), (2 + 127 * share) / (1 + share) * scale)
    allowed = 2048 * 2**-24 * 127 * scale
    torch.testing.assert_close(on_cpu(forward).out, wanted, atol=allowed, rtol=0.0)


def test_a_value_that_is_seen_alone_is_the_context(level):
    forward = attention((1,) * 40, width=64)
    values = forward.heads.v
    wanted = values.rows.tensor[:, values.column : values.column + 128] * values.rows.scale
    assert torch.equal(on_cpu(forward).out, wanted)


def test_a_larger_score_in_a_later_block():
    """What was summed before shrinks, down to nothing."""
    forward = attention((1040,), coded=False, heads=1)
    rows = forward.heads.q.rows.floats
    rows[:, 8:16] *= torch.logspace(-2, 2, 1040)[:, None]
    assert compare(forward).log_sum.max() > 100


def test_long_sentences_take_little_memory():
    """4,096 tokens: a matrix of queries times keys would take 64 MiB, and a gradient needs more
    than one."""
    forward = attention((4096,), width=8, heads=1, causal=True)
    backward = gradient_of(attention((8,), width=8, heads=1))
    on_cpu(attention((64,), width=8, heads=1))
    on_cpu(backward)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    forward = on_cpu(forward)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024
    backward.heads, backward.log_sum = forward.heads, forward.log_sum
    backward.dcontext, backward.dq.floats = torch.randn(4096, 8), empty(4096, 24)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    on_cpu(backward)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024
