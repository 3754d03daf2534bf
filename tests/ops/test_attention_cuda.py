"""Attention and its gradient on CUDA: kernels in the emulator, or on a GPU."""

import itertools
import math

import pytest
import torch

from lsq.native.compiler import compile_kernels
from lsq.native.launch import Kernel
from lsq.program.operation import Operation
from lsq.program.samples import placed
from lsq.program.values import Rows
from tests.ops.attentions import assert_zeros_behind, attention, codes_of, gradient_of
from tests.ops.compare import to_round
from tests.ops.cuda import DTYPES, compare_cuda, in_dtype, run

LONG = (3, 70, 0, 17)
"""Two tiles of 64 or three of 32 that are not full, no row, and two fragments."""


def compare_both(dtype=torch.float32, to_rounded=False, **options):
    """Compare attention and its gradient; what CUDA made of each."""
    forward = attention(**options)
    return compare_cuda(forward, dtype), compare_cuda(
        gradient_of(forward, to_rounded=to_rounded), dtype
    )


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "dropout": 0.3},
        {"others": (3, 97, 2, 0), "heads": 3, "group": 3, "coded": False},
        {"biased": True, "causal": True, "softmax_scale": 1.0},
        *(
            pytest.param(one, marks=pytest.mark.thorough)
            for one in (
                {"coded": False, "dropout": 0.2},
                {"others": (3, 97, 2, 0)},
                {"others": (5, 90, 0, 7), "causal": True, "coded": False},
                {"window": 65, "causal": True, "others": (5, 90, 0, 20)},
                {},
                {"others": (3, 20, 2, 0), "causal": True},
                {"heads": 4, "group": 2, "causal": True},
                {"window": 9, "causal": True, "dropout": 0.1},
                {"biased": True, "heads": 4, "group": 2, "others": (5, 90, 0, 20)},
            )
        ),
    ],
)
def test_in_float32(options):
    compare_both(lengths=LONG, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"coded": False},
        {"width": 128, "heads": 1},
        {"others": (3, 20, 2, 0), "causal": True},
        {"heads": 2, "group": 2, "window": 20, "causal": True},
        *(pytest.param(one, marks=pytest.mark.thorough) for one in ({}, {"biased": True})),
    ],
)
def test_in_half_precision(options):
    compare_both(torch.bfloat16, lengths=LONG, dropout=0.1, **options)


@pytest.mark.parametrize("width", [24, pytest.param(48, marks=pytest.mark.thorough), 64, 128])
def test_other_widths(width):
    compare_both(lengths=(20, 0, 5), width=width, heads=1, dropout=0.1)


@pytest.mark.parametrize("to_rounded", [False, True])
@pytest.mark.parametrize("others", [None, (2, 9, 1)])
def test_ends_of_gradients(to_rounded, others):
    compare_both(lengths=(7, 0, 9), others=others, to_rounded=to_rounded)


def test_clips_that_learn_by_lsq():
    forward = attention((7, 9))
    heads = forward.heads
    heads.q.rows = heads.k.rows = heads.v.rows = Rows(coded=codes_of(16, 48, error=True))
    compare_cuda(gradient_of(forward))


def test_the_context_is_rounded():
    compare_cuda(attention((7, 0, 40), dropout=0.1, to=to_round(47, 16, 0.8, error=True)))


@pytest.mark.parametrize(
    "lengths, others", [(LONG, None), (LONG, (5, 31, 0, 7)), ((), None), ((0, 0), (0, 0))]
)
def test_rows_behind_all_sentences_are_zeros(lengths, others):
    for to_rounded in (False, True):
        assert_zeros_behind(compare_cuda, lengths, others, to_rounded)


@pytest.mark.thorough
def test_many_tiles():
    """Three turns of every loop over tiles, and of the search for a sentence."""
    compare_both(lengths=(1, 0, 140, 2, 0, 1, 3), width=8, heads=1, coded=False)


@pytest.mark.thorough
def test_windows_over_many_tiles():
    """Tiles of keys that a query's window has not reached yet, and those that it has left."""
    compare_both(lengths=(1, 200, 3), heads=2, group=2, causal=True, window=40)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(value):
    forward = attention((3, 40), coded=False)
    forward.heads.q.rows.floats[20, 3] = value
    bad = compare_cuda(forward).out.isnan()
    assert bad[20, :8].all() and bad.sum() == 8


def test_a_poisoned_scale_poisons_everything():
    forward = attention((7, 9), to=to_round(16, 16, 1.0))
    forward.heads.q.rows.coded.scale.fill_(math.nan)
    found = run(forward)
    assert found.rounded.scale.isnan() and not found.rounded.codes.any()


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_an_empty_batch(lengths):
    forward = attention(lengths, to=to_round(0, 16, 1.0))
    assert compare_cuda(forward).rounded.scale.item() == pytest.approx(1 / 127)
    compare_cuda(gradient_of(forward))


def test_heads_that_kernels_do_not_have_are_refused():
    for width in (12, 136):
        with pytest.raises(ValueError, match=f"heads of {width} columns.*multiple of 8, up to 128"):
            attention((3,), width=width).cuda()


def test_codes_and_floats_do_not_mix():
    forward = attention((3,), (5,))
    forward.heads.q.rows = Rows(floats=torch.zeros(3, 16))
    with pytest.raises(
        ValueError, match="queries, keys and values must all be codes, or all floats: round all"
    ):
        forward.cuda()


def kernels_of(operation: Operation, dtype: torch.dtype) -> list[Kernel]:
    """What an operation launches on tiles, with activations in a dtype."""
    on_meta = placed(in_dtype(operation, dtype))
    scratch = [
        torch.empty(shape, dtype=kind, device="meta") for shape, kind in on_meta.cuda_scratch()
    ]
    launched = (entry.kernel for entry in on_meta.cuda(*scratch))
    return [
        kernel for kernel in launched if kernel.source in ("attention.cu", "attention_gradient.cu")
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
def test_kernels_spill_no_registers(target):
    for width, coded, dtype, biased in itertools.product(
        (64, 128), (False, True), DTYPES, (False, True)
    ):
        forward = attention((3,), width=width, coded=coded, biased=biased)
        for kernel in kernels_of(forward, dtype) + kernels_of(gradient_of(forward), dtype):
            taken = compile_kernels(kernel.source, kernel.defines, target).resources[kernel.name]
            assert not taken.spill_bytes, f"{kernel}, {target}"
    defines = (("COLUMNS", 1536), ("FLOAT", 1), ("KEYS", 0), ("LANES", 128), ("ROUNDED", 1))
    for name, taken in compile_kernels("attention_rows.cu", defines, target).resources.items():
        assert not taken.spill_bytes, f"{name}, {target}"
