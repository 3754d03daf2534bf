"""The fused loops give the same bits on any number of threads."""

import pytest
import torch

from lsq.csrc import loader
from lsq.ops.calibration import least_error_clip
from lsq.program import layers
from lsq.program.frames import FreshFrame
from tests.layers.shapes import config_of
from tests.ops.compare import KEY, border_tensors

FLOAT_PRODUCTS = {"attention", "attention_backward"}
"""Operations with float products inside, whose sums may be split differently by PyTorch."""


@pytest.fixture
def threads():
    """Sets PyTorch's number of threads, which is OpenMP's as well, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def same_bits(a, b):
    """Equality in which NaN equals NaN."""
    return torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)


@pytest.mark.parametrize("build", [
    lambda: layers.decoder_layer(config_of(dropout=0.2, backward="int8"), 11, 31, 9, True, True, True, True),
    lambda: layers.encoder_layer(
        config_of(dropout=0.2, backward="int8", clip_gradient="lsq", pre_norm=True, activation="gelu"),
        1, 67, False, True, True,
    ),
    lambda: layers.vocabulary_loss(config_of(backward="int8").quant, 341, 48, 91, 96, 1, 0.1, True, True),
    lambda: layers.embedding(config_of(mode="float").quant, 7, 11, 13, 200, 20, 1, 7.0, 0.1, True, True, True),
])
def test_operations(build, threads):
    program = build()
    values = border_tensors(program)
    for operation in program.operations:
        inputs = [None if tensor is None else values[tensor] for tensor in operation.inputs]
        results = []
        for count in (1, 2, 5):
            threads(count)
            written = FreshFrame().tensors_for(0, operation)
            operation.definition.cpu(*inputs, *written, **operation.attributes)
            results.append(written[: len(operation.outputs)])
        for tensor, *found in zip(operation.outputs, *results, strict=True):
            if tensor is not None:
                if operation.name not in FLOAT_PRODUCTS:
                    assert all(same_bits(found[0], other) for other in found[1:]), f"{operation.name} -> {tensor!r}"
                values[tensor] = found[0]


@pytest.mark.parametrize("threshold", [0, 2**30])
def test_softmax(threads, threshold):
    scores = torch.randn(6, 41, 67)
    results = []
    for count in (1, 2, 5):
        threads(count)
        probabilities, dropped = scores.clone(), torch.empty_like(scores)
        out = dropped if threshold else probabilities
        loader.call("lsq_masked_softmax", probabilities, None, KEY, 3, threshold, 1.25, 0, out, 3, 2, 41, 67)
        gradient = scores.flip(0).clone()
        loader.call("lsq_softmax_backward", probabilities, KEY, 3, threshold, 1.25, gradient, 6 * 41, 67)
        results.append((probabilities, out, gradient))
    assert all(map(torch.equal, results[0], results[1])) and all(map(torch.equal, results[0], results[2]))


@pytest.mark.parametrize("shape", [(1, 7), (341, 48), (41, 4100)])
@pytest.mark.parametrize("per_channel", [False, True])
def test_calibration(threads, shape, per_channel):
    x = torch.randn(shape)
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(least_error_clip(x, 8, per_channel))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
