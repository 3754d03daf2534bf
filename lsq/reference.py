"""An int8 linear layer on one page: what `QuantizedLinear` and a converted `nn.Linear` compute.

`Int8Linear` is the algorithm in plain PyTorch, slow and without lsq's kernels. Layers agree with it
bit by bit, in training and in evaluation, for the default QuantConfig and for clips="learned".
Three sums of floats are the exception: the gradients of the bias and, if clips learn, of both
clips. The CPU's loops add them in another order than PyTorch, so they agree within the rounding of
a float32 sum; the backend "reference" adds them as here.

Three things are left out: NaN and infinity, which the layer passes on through its scales; bfloat16
inputs; and sums of more than 133,000 products, which could overflow int32, and which the layer
splits.

Some definitions are in lsq.quant, because their code would distract:

* `largest_clips` gives the largest magnitude of each row;
* `gradient_scale` gives largest / 127 and its reciprocal, or 0 and 0 if all are zero (< 1e-35);
* `uniform_rows` gives random numbers in [0, 1) for a key, a subsequence and a shape (Philox, Salmon
  et al. 2011), the same on every device, so that all devices round alike;
* `draw_key` draws a key from PyTorch's generator, `key_of` computes one from the bits of tensors.
"""

import torch
from torch.autograd.function import once_differentiable

from lsq.quant import largest_clips
from lsq.quant.arithmetic import gradient_scale
from lsq.quant.random import draw_key, key_of, uniform_rows


class Int8Linear(torch.autograd.Function):
    """y = x weight^T + bias, of int8 codes, and so are both products of the backward pass."""

    @staticmethod
    def forward(ctx, x, weight, bias, input_clip, weight_clip, key, learned):
        # x (tokens, in_features), weight (out_features, in_features); codes have the same shapes.
        # Codes under a clip (Jacob et al. 2018, equation 1, symmetric): value = code * clip / 127.
        x_scale = input_clip / 127  # (1,): one clip for the whole input
        weight_scale = weight_clip / 127  # (out_features,): one clip for each output channel
        x_codes = round_to_nearest(x / x_scale)
        weight_codes = round_to_nearest(weight / weight_scale[:, None])
        # Sums of products of codes are exact. One factor for each output makes floats of them.
        y = multiply(x_codes, weight_codes.t()) * (x_scale * weight_scale)  # (tokens, out_features)
        ctx.save_for_backward(x, weight, input_clip, weight_clip, x_codes, weight_codes, key)
        ctx.learned = learned
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # (tokens, out_features)
        x, weight, input_clip, weight_clip, x_codes, weight_codes, key = ctx.saved_tensors
        x_scale, weight_scale = input_clip / 127, weight_clip / 127
        dbias = gradient.sum(dim=0) if ctx.needs_input_grad[2] else None
        # dy has the weight's scales in it, and one scale for each token: (tokens, 1).
        dy_codes, dy_scale = round_at_random(gradient * weight_scale, 1, key, subsequence=1)
        # dx = gradient weight, a sum over out_features, along which weight_scale varies: dy has it.
        dx = multiply(dy_codes, weight_codes) * dy_scale
        # dweight = gradient^T x, a sum over tokens, along which dy_scale varies: x gets it, and is
        # rounded once more, with one scale for each input: (1, in_features).
        x_again, again_scale = round_at_random(x_codes * dy_scale, 0, key, subsequence=2)
        dweight = multiply(dy_codes.t(), x_again) * (again_scale * x_scale)
        dweight = dweight * (1 / weight_scale)[:, None]  # dy has weight_scale
        dinput_clip = dweight_clip = None
        if ctx.learned:  # else clips are measured, and no gradient is masked
            dx, dinput_clip = pact(dx, x, input_clip)
            dweight, dweight_clip = pact(dweight, weight, weight_clip)
        return dx, dweight, dbias, dinput_clip, dweight_clip, None, None


def multiply(a, b):
    """Multiply codes (rows, inner) and (inner, columns), exactly in int32; return float32."""
    return (a.to(torch.int32) @ b.to(torch.int32)).to(torch.float32)


def round_to_nearest(steps):
    """Round values, divided by their scale, to codes -127 ... 127: half to even, clipped."""
    return steps.clamp(-127, 127).round().to(torch.int8)


def round_at_random(values, dim, key, subsequence):
    """Round stochastically (Gupta et al. 2015): the mean of floor(v + u), u in [0, 1), is v.

    Returns codes and scales: the largest magnitude along `dim` becomes 127, so nothing is clipped.
    """
    scale, reciprocal = gradient_scale(values.abs().amax(dim, keepdim=True), 127)
    steps = values * reciprocal + uniform_rows(key, subsequence, *values.shape)
    return steps.floor().clamp(-127, 127).to(torch.int8), scale


def pact(gradient, values, clip):
    """Return straight-through gradients of `values` and clips (PACT, Choi et al. 2018, equation 3).

    Within the clip a value gets the gradient of its rounded value. A value beyond is rounded to
    sign(value) * clip: it gets 0, and the clip, (1,) or (rows,), the sum of gradient * sign(value).
    """
    outside = values.abs() > clip[:, None]
    of_clip = torch.where(outside, gradient * values.sign(), 0.0)
    return torch.where(outside, 0.0, gradient), of_clip.reshape(len(clip), -1).sum(dim=1)


def reference_linear(x, weight, bias, input_clip, weight_clip, *, learned=False, training=True):
    """Compute what a layer with these parameters does: x (..., in_features) -> (..., out_features).

    By default a weight's clips are the largest magnitude of each row, and no clip has a gradient.
    `learned`: clips are parameters that train by PACT. In training the key of the random numbers is
    drawn from PyTorch's generator. In evaluation equal inputs and weights have equal gradients.
    """
    rows = x.reshape(-1, x.shape[-1])  # (tokens, in_features)
    if not learned:
        weight_clip = largest_clips(weight, weight_clip)
    key = draw_key() if training else key_of(rows, weight)
    y = Int8Linear.apply(rows, weight, bias, input_clip, weight_clip, key, learned)
    return y.view(*x.shape[:-1], len(weight))
