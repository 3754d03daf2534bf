"""--optimizer lsq_adam through the plugin: against fairseq's adam, resumed, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch

from lsq.config import QuantConfig
from lsq.fairseq.optimizer import LSQAdam
from lsq.ops.rounding import RoundWeight
from lsq.run.parameter_state import state_of
from tests import sampling
from tests.fairseq.comparison import assert_equal_states, assert_resumes_to_the_bit
from tests.fairseq.test_task import command
from tests.fairseq.two_workers import train_by_two

OURS, THEIRS = "--optimizer lsq_adam", "--optimizer adam"
RATES = "--lr-scheduler inverse_sqrt --warmup-updates 4 --weight-decay 0.01 --adam-betas (0.9,0.98)"


def config(**options):
    """As fairseq makes it of the command line."""
    return SimpleNamespace(
        lr=[0.1], adam_betas="(0.9, 0.98)", adam_eps=1e-8, weight_decay=0.0, **options
    )


@pytest.mark.parametrize(
    "options",
    sampling.first(
        ["--lsq-backward int8 --update-freq 2", "--clip-norm 1.0", "--lsq-mode float"], 1
    ),
)
def test_training_equals_that_of_fairseq(train, losses, tmp_path, options):
    """Within what rounding of floats makes of the first updates."""
    theirs = train(tmp_path / "theirs", f"--max-update 4 {THEIRS} {RATES} {options}")
    expected = losses.copy()
    ours = train(tmp_path / "ours", f"--max-update 4 {OURS} {RATES} {options}")
    assert losses[len(expected) :] == pytest.approx(expected, rel=2e-3)
    assert losses[len(expected)] == expected[0]
    assert ours["model"].keys() == theirs["model"].keys()
    if "float" in options:
        for name, tensor in theirs["model"].items():
            # keys' biases have no gradient but for rounding errors, which Adam makes steps of
            torch.testing.assert_close(ours["model"][name], tensor, rtol=1e-4, atol=2e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        pytest.param("--lsq-backward int8 --update-freq 2", marks=pytest.mark.thorough),
        "--clip-norm 0.5 --lsq-memory naive",
    ],
)
def test_resuming_continues_to_the_bit(train, tmp_path, options):
    assert_resumes_to_the_bit(train, tmp_path, f"{OURS} {options}", (3, 6))


@pytest.mark.parametrize(("first", "second"), sampling.first([(OURS, THEIRS), (THEIRS, OURS)], 1))
def test_one_adam_goes_on_from_the_other(train, tmp_path, first, second):
    before = train(tmp_path, f"--max-update 3 {first}")["last_optimizer_state"]["state"]
    after = train(tmp_path, f"--max-update 4 {second}")["last_optimizer_state"]["state"]
    assert {int(moments["step"]) for moments in after.values()} == {4}
    for number, moments in after.items():
        assert (moments["exp_avg_sq"] >= 0.99 * before[number]["exp_avg_sq"]).all()


@pytest.mark.thorough
def test_codes_come_from_the_optimizer(train, tmp_path, monkeypatch):
    """Every weight is rounded by the first passes, and later only where clips of weights are
    measured."""
    made, steps, stepped, rounded = [], [], LSQAdam.step, RoundWeight.cpu
    monkeypatch.setattr(RoundWeight, "cpu", lambda one: (made.append(1), rounded(one)))
    monkeypatch.setattr(LSQAdam, "step", lambda one: (stepped(one), steps.append(len(made))))
    monkeypatch.setattr(QuantConfig, "calibration_passes", 2)
    train(tmp_path, f"--max-update 6 {OURS} --lsq-clips learned")
    weights = steps[0]
    assert weights > 10
    more = [now - before for before, now in zip(steps, steps[1:], strict=False)]
    assert more == [0, weights, 0, 0, 0]


def test_options_that_it_does_not_go_with_are_refused():
    for option in ("fp16", "bf16", "amp", "use_bmuf"):
        with pytest.raises(ValueError, match=f"does not go with --{option.replace('_', '-')}"):
            LSQAdam(config(**{option: True}), [torch.nn.Parameter(torch.zeros(3))])


def test_gradients_are_left_as_they_are():
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = LSQAdam(config(), [parameter])
    parameter.grad = torch.full((4,), 2.0)
    optimizer.multiply_grads(0.5)
    assert optimizer.clip_grad_norm(1.0) == 2.0
    assert (parameter.grad == 2.0).all() and float(optimizer.gradient_factor) == pytest.approx(0.25)
    optimizer.step()
    assert (
        optimizer.gradient_factor == 1.0 and state_of(parameter).optimizer() is optimizer.optimizer
    )
    optimizer.zero_grad()
    assert parameter.grad is None


@pytest.mark.thorough
@pytest.mark.parametrize("options", ["--lsq-gradients int8", "--update-freq 2 --clip-norm 0.1"])
def test_two_processes_end_with_the_same_parameters(toy, tmp_path, options):
    given = command(toy, tmp_path / "save", f"--max-update 4 --lsq-clips learned {OURS} {options}")
    _, (first, second) = train_by_two(given)
    assert_equal_states(first, second)
