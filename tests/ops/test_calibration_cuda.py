"""The search for the clip of least error on CUDA finds the CPU's bits."""

import pytest
import torch

from lsq import quant
from lsq.native.compiler import compile_kernels
from lsq.ops.calibration_cuda import HELD, MOST_WARPS, RUN
from tests.ops.compare import on_cpu
from tests.ops.cuda import DTYPES, ORDERS, run
from tests.ops.test_calibration import clip_of


def compare_bits(
    x: torch.Tensor, bits: int = 8, dtype: torch.dtype = torch.float32, **options
) -> None:
    """In any order of threads, the clips and counts of the CPU. `options`: see `clip_of`."""
    narrow = x.to(dtype)
    wanted = on_cpu(clip_of(narrow.float(), bits, **options))
    for order in ORDERS:
        found = run(clip_of(narrow, bits, **options), order=order)
        assert torch.equal(found.clip, wanted.clip) and torch.equal(found.unusable, wanted.unusable)


def turns() -> None:
    """Three turns of all loops: over runs of a warp, over joined runs, over rows."""
    compare_bits(torch.randn(1, (2 * MOST_WARPS + 1) * RUN + 5))
    some = torch.randn(70, 16)
    some[::3] = 0.0
    compare_bits(some)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, columns", [(1, 1), (7, 33), (3, 512), (5, 1000), (2, 4104)])
def test_rows(rows, columns, dtype):
    compare_bits(torch.randn(rows, columns), dtype=dtype)


@pytest.mark.parametrize("bits", [2, 4])
def test_few_bits_and_outliers(bits):
    x = torch.distributions.StudentT(2.0).sample((5, 777))
    compare_bits(x, bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [33, 1000])
def test_near_clips_of_before(columns, dtype):
    """Of which some are far off, and some are none."""
    x = torch.randn(7, columns)
    factor = torch.tensor([1.0, 1.1, 0.9, 3.0, 1e-3, 0.0, float("nan")])
    compare_bits(x, dtype=dtype, before=factor * on_cpu(clip_of(x)).clip)


@pytest.mark.parametrize("rows, columns", [(1, 8), (9, 40), (16, 1000)])
def test_columns(rows, columns):
    x = torch.randn(rows, columns)
    x[0, 7] = float("inf")
    compare_bits(x, turned=True)
    compare_bits(x, turned=True, before=on_cpu(clip_of(x)).clip)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_shared_memory_does_not_hold(dtype):
    compare_bits(torch.randn(2, HELD + 9), dtype=dtype)


def test_a_tensor_of_which_a_sample_is_looked_at():
    values = 2**18 + 8
    assert quant.sample_stride(values) == 3
    x = torch.randn(1, values)
    x[0, 1] = float("inf")  # between two that are looked at
    compare_bits(x)


def test_rows_of_zeros_and_values_that_are_not_finite():
    x = torch.randn(70, 40)
    x[[0, 31, 32, 33, 64, 69]] = 0.0
    x[5, 6], x[7, 39], x[8] = float("nan"), float("-inf"), float("inf")
    compare_bits(x)
    compare_bits(torch.zeros(2, 8))


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_no_registers_are_spilled(target):
    for warps in (1, 2, 4, 8, MOST_WARPS):
        found = compile_kernels("calibration.cu", (("FLOAT", 1), ("WARPS", warps)), target)
        assert not found.resources["lsq_least_error_clip"].spill_bytes
