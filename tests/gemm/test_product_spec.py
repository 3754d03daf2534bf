"""Products that cuBLASLt cannot run are refused before it is asked, in words that say what to do."""

import math

import pytest
import torch

from lsq.gemm import LARGEST_INNER
from lsq.gemm.product_spec import spec_for
from tests.gemm.operands import codes, product, spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 24}, "k of an int8 product is a multiple of 16, not 24; pad it to 32"),
        ({"n": 50}, "n of an int8 product is a multiple of 4, not 50; pad it to 52"),
        ({"leading_a": 72}, "leading_a .* multiple of 16, not 72"),
        ({"leading_b": 68}, "leading_b .* multiple of 16, not 68"),
        ({"leading_out": 49}, "leading_out .* multiple of 4, not 49"),
        ({"batch": 2, "stride_a": 41 * 64 + 8}, "stride_a .* multiple of 16"),
        ({"k": (LARGEST_INNER // 16 + 1) * 16}, f"overflow.*{LARGEST_INNER}"),
        ({"transpose_a": True}, "neither transposed.*transpose_a=True.*write the transpose first"),
        ({"transpose_b": True}, "neither transposed.*transpose_b=True"),
        ({"m": 0}, "m is 0; it must be from 1"),
        ({"batch": 0}, "batch is 0"),
        ({"m": 2**31}, "m is 2147483648"),
        ({"leading_a": 48}, "leading_a is 48; it must be from 64"),
        ({"leading_out": 44}, "leading_out is 44; it must be from 48"),
        ({"batch": 2, "stride_out": 41 * 48 - 4}, "stride_out is 1964; it must be from 1968"),
        ({"dtype": torch.int16}, "torch.int8, torch.bfloat16.*not torch.int16"),
        ({"dtype": torch.float64}, "not torch.float64"),
        ({"out_dtype": torch.float32}, "torch.int8 gives torch.int32 or torch.int8, not torch.float32"),
        ({"dtype": torch.float16, "out_dtype": torch.bfloat16}, "torch.float16 gives .* not torch.bfloat16"),
        ({"alpha": "scalar"}, "int32 sums are not scaled"),
        ({"alpha": "vector"}, "int32 sums are not scaled"),
        ({"dtype": torch.float32, "out_dtype": torch.float32, "alpha": "vector"}, "vector. is for int8 results"),
        ({"alpha": "two"}, "one, scalar, vector, not 'two'"),
    ],
)
def test_specs_that_cannot_run_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        spec(**changes)


def test_packed_layouts_are_spelled_out():
    assert spec() == spec(leading_a=64, leading_b=64, leading_out=48)
    assert spec(batch=2) == spec(batch=2, stride_a=41 * 64, stride_b=48 * 64, stride_out=41 * 48)
    assert hash(spec()) == hash(spec(stride_a=0))


def misaligned(shape, dtype):
    return torch.empty(math.prod(shape) + 1, dtype=dtype)[1:].view(shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": codes(41, 80)}, r"a \[41, 80\], b \[48, 64\], out \[41, 48\] do not fit.*a \[M, K\] and b \[N, K\]"),
        ({"b": codes(64, 48)}, "do not fit"),
        ({"out": torch.empty(41, 47, dtype=torch.int32)}, "do not fit"),
        ({"a": codes(2, 41, 64)}, "all matrices or all batches"),
        ({"a": codes(64)}, "all matrices or all batches"),
        ({"b": torch.randn(48, 64)}, "a is torch.int8 and b is torch.float32"),
        ({"a": codes(64, 41).t()}, "rows of a are contiguous, not strided by 41"),
        ({"b": misaligned((48, 64), torch.int8)}, "b starts at a multiple of 16 bytes, not at 0x"),
        ({"out": misaligned((41, 48), torch.int32)}, "out starts at a multiple of 16 bytes"),
        ({"out": torch.empty(41, 48, dtype=torch.int32, device="meta")}, "one device, not .*meta"),
        ({"alpha": torch.ones(47)}, r"alpha is contiguous float32 \[48\], not torch.float32 \[47\]"),
        ({"alpha": torch.ones(48).double()}, "not torch.float64"),
        ({"alpha": torch.ones(96)[::2]}, "contiguous"),
        ({"alpha": 2.0}, "int32 sums are not scaled"),
        ({"transpose_b": True, "b": codes(64, 48)}, "write the transpose first"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes, message):
    tensors = {"a": codes(41, 64), "b": codes(48, 64), "out": torch.empty(41, 48, dtype=torch.int32)}
    with pytest.raises(ValueError, match=message):
        spec_for(product(**tensors | changes))
