"""Backward products on CUDA: transposed int8 operands or dequantised ones, masks and the gradients of the clips."""

import math

import pytest
import torch

from lsq.ops import registry, rounding
from lsq.ops.kernels import add_parts
from lsq.quant import quantize
from tests.ops import cuda
from tests.ops.compare import KEY, fused
from tests.ops.cuda import compare_cuda
from tests.ops.operands import ROWS

INNER, OUTPUTS = 48, 32
HALVES = (torch.bfloat16, torch.float16)


def operands(rows, bits=8, clips=OUTPUTS, error=False, inner=INNER, outputs=OUTPUTS):
    """(gradient, codes, scale, clipped bits and error of x; weight, its clip, codes and scale), with much clipped."""
    x, weight, clip = torch.randn(rows, inner), torch.randn(outputs, inner), 0.8 + torch.rand(clips)
    gradient = torch.randn(rows, outputs)
    rounded = rounding.round_activation(x, torch.tensor([1.2]), bits=bits, error=error)
    weight_codes, weight_scale, _ = quantize(weight, clip, bits)
    return gradient, rounded, weight, clip, weight_codes, weight_scale.expand(outputs).contiguous()


def input_gradient(case, backward, dtype=torch.float32, **attributes):
    gradient, (codes, _, clipped, error), _, _, weight_codes, weight_scale = case
    rows, row_scale = in_mode(gradient, weight_scale, backward, dtype)
    inputs = rows, row_scale, weight_codes, weight_scale, codes, clipped, error
    return compare_cuda("linear_input_gradient", *inputs, dtype=dtype, floats=(0,), **attributes), inputs


def weight_gradient(case, backward, dtype=torch.float32, **attributes):
    gradient, (codes, scale, _, _), weight, clip, _, weight_scale = case
    rows, row_scale = in_mode(gradient, weight_scale, backward, dtype)
    attributes = {"clip_gradient": "pact", **attributes}
    if backward == "int8":
        attributes["stream"] = 5
    inputs = rows, row_scale, codes, scale, weight_scale, weight, clip, KEY if backward == "int8" else None
    found = compare_cuda("linear_weight_gradient", *inputs, **attributes)
    return found, fused("linear_weight_gradient", *map(_wide, inputs), **attributes)


def in_mode(gradient, weight_scale, backward, dtype):
    """(gradient or its codes, row scales or None)."""
    return rounding.round_rows(gradient, weight_scale, KEY, 1) if backward == "int8" else (gradient.to(dtype), None)


def run(name, *inputs, dtype=torch.float32, floats=(), expected=None, attributes):
    """Outputs of the CUDA implementation alone, shaped like `expected` or what the reference returns."""
    definition = registry.definition(name)
    expected = expected or definition.reference(*map(_wide, inputs), **attributes)
    return cuda.run(definition, inputs, expected, dtype, floats, (), attributes)


def _wide(tensor):
    return tensor.float() if tensor is not None and tensor.dtype in HALVES else tensor


@pytest.mark.parametrize("backward", ["int8", "float"])
@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_inputs(rows, backward, error):
    case = operands(rows, bits=4 if error else 8, error=error)
    (dx, _), inputs = input_gradient(case, backward, bits=4 if error else 8)
    if backward == "int8":
        assert torch.equal(dx, fused("linear_input_gradient", *inputs, bits=4 if error else 8)[0])


@pytest.mark.parametrize("backward", ["int8", "float"])
@pytest.mark.parametrize("clips", [1, OUTPUTS])
@pytest.mark.parametrize("clip_gradient, bits", [("pact", 8), ("lsq", 4)])
@pytest.mark.parametrize("rows", [7, 341])
def test_weights(rows, backward, clips, clip_gradient, bits):
    found, on_cpu = weight_gradient(operands(rows, bits, clips), backward, bits=bits, clip_gradient=clip_gradient)
    if backward == "int8":
        assert torch.equal(found[0], on_cpu[0])


@pytest.mark.parametrize("rows", [1, 41])
def test_wide_rows(rows):
    """More columns than a warp, a patch and a tile hold."""
    case = operands(rows, inner=1040, outputs=144, clips=144)
    for backward in ("int8", "float"):
        input_gradient(case, backward, bits=8)
        weight_gradient(case, backward, bits=8, clip_gradient="lsq")


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_in_half_precision(dtype):
    case = operands(41, error=True)
    for backward in ("int8", "float"):
        input_gradient(case, backward, dtype, bits=8)
        weight_gradient(case, backward, dtype, bits=8)


@pytest.mark.parametrize("backward_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_products_in_half_precision(backward_dtype, dtype):
    """Whatever the dtype of the activations is; where codes times scales are exact in it, so is the product."""
    gradient, rounded, weight, clip, weight_codes, weight_scale = operands(41)
    gradient = gradient.bfloat16().half().float()
    whole = rounded[0], torch.tensor([2.0**-6]), *rounded[2:]
    case = gradient, whole, weight, clip, weight_codes, torch.full_like(weight_scale, 2.0**-7)
    gradient, (codes, scale, clipped, error), *_, weight_scale = case
    exact = fused("linear_input_gradient", gradient, None, weight_codes, weight_scale, codes, clipped, error, bits=8)
    outputs = run("linear_input_gradient", gradient.to(dtype), None, weight_codes, weight_scale, codes, clipped, error,
                  dtype=dtype, floats=(0,), attributes={"bits": 8, "dtype": backward_dtype})
    narrow = 4e-3 if dtype == torch.bfloat16 else 5e-4 if dtype == torch.float16 else 2e-6
    assert outputs[0].dtype == dtype
    assert (outputs[0].float() - exact[0]).abs().max() <= narrow * exact[0].abs().max()
    attributes = {"bits": 8, "clip_gradient": "pact"}
    inputs = None, codes, scale, weight_scale, weight, clip, None
    exact = fused("linear_weight_gradient", gradient, *inputs, **attributes)
    outputs = run("linear_weight_gradient", gradient.to(dtype), *inputs, dtype=dtype,
                  attributes={**attributes, "dtype": backward_dtype})
    assert (outputs[0] - exact[0]).abs().max() <= 2e-6 * exact[0].abs().max()


@pytest.mark.parametrize("backward", ["int8", "float"])
def test_an_empty_batch_gives_zeros(backward):
    gradient, rounded, weight, clip, weight_codes, weight_scale = operands(0)
    rows, row_scale = gradient, None
    if backward == "int8":
        rows, row_scale = gradient.to(torch.int8), torch.empty(0)
    codes, scale, clipped, error = rounded
    dx, dclip = run("linear_input_gradient", rows, row_scale, weight_codes, weight_scale, codes, clipped, error,
                    floats=(0,), attributes={"bits": 8})
    assert dx.shape == (0, INNER) and dclip == 0
    for clips in (clip, clip[:1]):
        dweight, dclip = run(
            "linear_weight_gradient", rows, row_scale, codes, scale, weight_scale, weight, clips, KEY,
            expected=(weight, clips), attributes={"bits": 8, "clip_gradient": "lsq"},
        )
        assert not dweight.any() and not dclip.any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_poisoned_row_poisons_the_whole_weight_gradient(value):
    gradient, (codes, scale, *_), weight, clip, _, weight_scale = operands(41)
    rows, row_scale = rounding.round_rows(gradient, weight_scale, KEY, 1)
    row_scale[40] = value
    dweight, dclip = compare_cuda(
        "linear_weight_gradient", rows, row_scale, codes, scale, weight_scale, weight, clip, KEY, bits=8,
        clip_gradient="pact", stream=5,
    )
    assert dweight[weight.abs() <= clip[:, None]].isnan().all()


def test_padded_rows_of_a_vocabulary_give_no_gradient():
    gradient, (codes, scale, *_), weight, clip, _, weight_scale = operands(41, outputs=48, clips=48)
    for backward in ("int8", "float"):
        rows, row_scale = in_mode(gradient, weight_scale, backward, torch.float32)
        dweight, _ = compare_cuda(
            "linear_weight_gradient", rows, row_scale, codes, scale, weight_scale, weight[:33].contiguous(),
            clip[:33].contiguous(), KEY, bits=8, clip_gradient="pact",
        )
        assert dweight.shape == (33, INNER)


@pytest.mark.parametrize("parts", [1, 255, 1000])
def test_parts_of_a_sum_are_added_up(parts):
    target = cuda.current_device()
    partial = torch.randn(parts, device=target.place)
    out = torch.empty(1, device=target.place)
    target.run([add_parts(partial, out, 0.5)])
    assert torch.allclose(out.double(), 0.5 * partial.double().sum(), rtol=1e-6)
