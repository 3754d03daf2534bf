"""Error feedback: residuals by name, through other buckets, skipped steps and restarts."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lsq.dist import GradientConfig, compress_gradients
from lsq.dist.feedback import ErrorFeedback
from tests.dist.processes import run


def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(size)) for name, size in (("a", 3), ("b", 5), ("c", 2))}


def step(
    feedback: ErrorFeedback, buckets: list[list[nn.Parameter]], value: float, mean: float = 0.0
) -> list[torch.Tensor]:
    """One step in which every exchange leaves errors of `value`; the buffers after residuals were
    added."""
    buffers = []
    for index, bucket in enumerate(buckets):
        buffer = torch.zeros(sum(parameter.numel() for parameter in bucket))
        error = feedback.begin(index, bucket, buffer)
        buffers.append(buffer)
        assert not error.any()
        error.copy_(torch.arange(buffer.numel()) + value)
        feedback.end(torch.full_like(buffer, mean))
    return buffers


def test_errors_are_added_to_the_next_gradient():
    a, b, c = parameters().values()
    feedback = ErrorFeedback([("a", a), ("b", b), ("c", c)])
    assert not any(buffer.any() for buffer in step(feedback, [[a, b], [c]], 1.0))
    first, second = step(feedback, [[a, b], [c]], 2.0)
    assert torch.equal(first, torch.arange(8) + 1.0) and torch.equal(second, torch.arange(2) + 1.0)


def test_residuals_follow_parameters_into_other_buckets():
    a, b, c = parameters().values()
    feedback = ErrorFeedback([("a", a), ("b", b), ("c", c)])
    step(feedback, [[a, b], [c]], 1.0)
    first, second = step(feedback, [[c, b], [a]], 0.0)
    assert first.tolist() == [1, 2, 4, 5, 6, 7, 8] and second.tolist() == [1, 2, 3]


def test_after_a_step_that_is_not_finite_residuals_begin_from_zero():
    """A loss scaler has then changed the unit of gradients."""
    a, b, c = parameters().values()
    feedback = ErrorFeedback([("a", a), ("b", b), ("c", c)])
    step(feedback, [[a, b, c]], 1.0)
    step(feedback, [[a, b, c]], 9.0, mean=torch.inf)
    (buffer,) = step(feedback, [[a, b, c]], 5.0)
    assert not buffer.any()
    (buffer,) = step(feedback, [[a, b, c]], 0.0)
    assert torch.equal(buffer, torch.arange(10) + 5.0)


def test_one_bucket_that_is_not_finite_counts_for_all():
    a, b, c = parameters().values()
    feedback = ErrorFeedback([("a", a), ("b", b), ("c", c)])
    for index, (bucket, mean) in enumerate([([a, b], 0.0), ([c], torch.nan)]):
        buffer = torch.zeros(sum(parameter.numel() for parameter in bucket))
        feedback.begin(index, bucket, buffer).fill_(9.0)
        feedback.end(torch.full_like(buffer, mean))
    assert not any(buffer.any() for buffer in step(feedback, [[a, b], [c]], 0.0))


def test_steps_without_the_first_bucket_are_steps():
    a, b, c = parameters().values()
    feedback = ErrorFeedback([("a", a), ("b", b), ("c", c)])
    step(feedback, [[a, b], [c]], 1.0)
    found = []
    for value in (2.0, 3.0):
        buffer = torch.zeros(2)
        feedback.begin(1, [c], buffer).fill_(value)
        feedback.end(torch.zeros(2))
        found.append(buffer.tolist())
    assert found == [[1, 2], [2, 2]]


def test_a_state_is_taken_up_before_buckets_are_known():
    a, b, c = parameters().values()
    feedback = ErrorFeedback([("a", a), ("b", b), ("c", c)])
    step(feedback, [[a, b], [c]], 1.0)
    state = feedback.state()
    assert list(state) == ["residual.a", "residual.b", "residual.c"]
    other = ErrorFeedback([("a", a), ("b", b), ("c", c)])
    other.load(state)
    assert {name: value.tolist() for name, value in other.state().items()} == {
        "residual.a": [1, 2, 3],
        "residual.b": [4, 5, 6, 7, 8],
        "residual.c": [1, 2],
    }
    (buffer,) = step(other, [[b, a, c]], 0.0)
    assert buffer.tolist() == [4, 5, 6, 7, 8, 1, 2, 3, 1, 2]


def test_residuals_of_unknown_parameters_are_refused():
    with pytest.raises(ValueError, match="residual.x"):
        ErrorFeedback(parameters().items()).load({"residual.x": torch.zeros(1)})


def test_residuals_without_error_feedback_are_refused():
    assert (
        run(refusals, 2)
        == ["residuals were given, but error_feedback is off; turn it on, or leave them out"] * 2
    )


def refusals(rank: int) -> str:
    compression = compress_gradients(
        DistributedDataParallel(nn.Linear(3, 2)), GradientConfig(mode="int8")
    )
    compression.load_state_dict({})
    with pytest.raises(ValueError) as raised:
        compression.load_state_dict({"residual.weight": torch.zeros(6)})
    return str(raised.value)


def sums_of_means(rank: int, options: dict, steps: int) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """The sum over steps of one and the same gradient's mean, with a restart in between; the exact
    one; the state."""
    x = torch.randn(5, 301, generator=torch.Generator().manual_seed(rank))
    total, state = torch.zeros(903), {}
    for _ in range(2):
        torch.manual_seed(0)
        net = nn.Linear(301, 3, bias=False)
        model = DistributedDataParallel(net, bucket_cap_mb=0.001)
        compression = compress_gradients(model, GradientConfig(**options))
        compression.load_state_dict(state)
        for _ in range(steps // 2):
            net.zero_grad()
            model(x).square().sum().backward()
            total += net.weight.grad.flatten()
        state = compression.state_dict()
    net.zero_grad()
    net(x).square().sum().backward()
    return total, net.weight.grad.flatten() * steps, state


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ({"mode": "int8", "block": 1024}, 2),
        ({"mode": "int4_hier", "node_size": 2, "rounding": "nearest"}, 4),
    ],
)
def test_what_rounding_took_is_given_back(options, workers):
    """The sum of many rounded means comes nearer to the exact one, and first hops lose nothing but
    the last error."""
    errors = []
    for feedback in (True, False):
        results = run(sums_of_means, workers, {**options, "error_feedback": feedback}, 8)
        exact = torch.stack([own for _, own, _ in results]).mean(0)
        assert all(torch.equal(results[0][0], total) for total, _, _ in results)
        errors.append((results[0][0] - exact).norm())
        assert all(bool(state) == feedback for _, _, state in results)
    assert errors[0] < 0.75 * errors[1]
