"""The fused loops give the same bits on any number of threads."""

import pytest
import torch

from lsq.ops.nonlinearity import Activation
from tests.ops import attentions, test_rotation
from tests.ops.compare import on_cpu, written
from tests.ops.test_calibration import measured
from tests.ops.test_embedding import embed, embed_gradient
from tests.ops.test_gated import gated, gated_gradient
from tests.ops.test_next_words import next_words
from tests.ops.test_project import rounded_project
from tests.ops.test_residual_norm import norm, norm_gradient
from tests.ops.test_vocabulary_loss import gradient_of, of_codes, rounded_of


@pytest.fixture
def threads():
    """Sets PyTorch's number of threads, which is OpenMP's as well, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def same_bits(a, b):
    """Equality in which NaN equals NaN."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def normed():
    return on_cpu(
        norm(torch.randn(341, 48), torch.randn(341, 48), rounds=True, error=True, dropout=0.2)
    )


OPERATIONS = {
    "attention": lambda: attentions.attention(dropout=0.1),
    "gradient of attention": lambda: attentions.gradient_of(
        attentions.attention(dropout=0.1), to_rounded=True
    ),
    "gated": lambda: gated(341, 88, dropout=0.3),
    "gradient of gated": lambda: gated_gradient(341, 88, dropout=0.3),
    "next words": lambda: next_words(6, 3000, 9, 1, every=True),
    "project": lambda: rounded_project(341, 48, Activation.gelu, 0.3),
    "gradient of a rotation": lambda: test_rotation.gradient_of(
        test_rotation.rotate(341, normed=True)
    ),
    "norm": normed,
    "norm of nothing finite": lambda: norm(torch.full((7, 48), torch.inf), rounds=True),
    "gradient of a norm": lambda: norm_gradient(normed()),
    "rounded gradient of a norm": lambda: norm_gradient(normed(), rounds=True),
    "embedding": lambda: embed(341, 200, 0.1),
    "gradient of an embedding": lambda: embed_gradient(
        torch.randn(341, 200), torch.randint(0, 11, (341,))
    ),
    "loss": lambda: of_codes(341, 1003, 1008),
    "gradient of a loss": lambda: gradient_of(on_cpu(of_codes(341, 1003, 1008))),
    "rounded gradient of a loss": lambda: rounded_of(on_cpu(of_codes(341, 1003, 1008))),
}
"""One that exercises each loop."""


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_operations(operation, threads):
    declared, results = operation(), []
    for count in (1, 2, 5):
        threads(count)
        results.append(written(on_cpu(declared)))
    for name, tensor in results[0].items():
        if tensor is not None:
            assert all(same_bits(tensor, other[name]) for other in results[1:]), name


@pytest.mark.parametrize("shape", [(1, 7), (341, 48), (41, 4100)])
@pytest.mark.parametrize("per_channel", [False, True])
def test_calibration(threads, shape, per_channel):
    x = torch.randn(shape)
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(measured(x, per_channel=per_channel))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
