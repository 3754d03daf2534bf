"""Diverged trainings, data parallel training on CPUs, and attributes that are replaced."""

import pytest
import torch
from fairseq.trainer import Trainer
from torch import nn

from lsq.fairseq import compatibility
from lsq.fairseq.compatibility import CPUSafeDataParallel
from tests.sampling import first

FAIRSEQ = "--arch transformer --criterion label_smoothed_cross_entropy"


@pytest.fixture
def damaging(monkeypatch):
    """damaging(name): that parameter gets a NaN before the fourth update."""

    def damaging(name: str) -> None:
        seed = Trainer._set_seed

        def set_seed(trainer):
            if trainer.get_num_updates() == 3:
                with torch.no_grad():
                    parameter = dict(trainer.get_model().named_parameters())[name]
                    parameter[4 % len(parameter)] = float("nan")
            seed(trainer)

        monkeypatch.setattr(Trainer, "_set_seed", set_seed)

    return damaging


@pytest.mark.parametrize(
    ("arch", "name"),
    first(
        [
            ("", "encoder.embed_tokens.weight"),
            (FAIRSEQ, "encoder.embed_tokens.weight"),
            ("", "decoder.layers.1.feed_forward.fc1_weight"),
            ("", "decoder.layers.0.feed_forward.fc2_bias"),
            ("", "encoder.layers.0.feed_forward.activation_clip"),
            ("--lsq-mode float", "decoder.output_projection.weight"),
        ],
        2,
    ),
)
def test_nan_in_a_parameter_is_named(train, tmp_path, damaging, arch, name):
    damaging(name)
    with pytest.raises(
        FloatingPointError, match=f"^{name} holds .* after 3 updates; the training has diverged"
    ):
        train(tmp_path, arch)
    assert not (tmp_path / "checkpoint_last.pt").exists()


def test_a_gradient_that_is_not_finite_is_named(train, tmp_path, monkeypatch):
    step = Trainer.clip_grad_norm

    def clip_grad_norm(trainer, norm):
        parameters = dict(trainer.get_model().named_parameters())
        parameters["encoder.layers.0.fc1.bias"].grad[0] = float("inf")
        return step(trainer, norm)

    monkeypatch.setattr(Trainer, "clip_grad_norm", clip_grad_norm)
    monkeypatch.setattr(Trainer, "zero_grad", lambda trainer: None)
    with pytest.raises(
        FloatingPointError, match="^the gradient of encoder.layers.0.fc1.bias holds 1 values of 48"
    ):
        train(tmp_path, FAIRSEQ)


def test_a_training_that_diverges_in_its_last_update_writes_nothing(train, tmp_path):
    with pytest.raises(FloatingPointError, match="checkpoint_last.pt is not written"):
        train(tmp_path, f"{FAIRSEQ} --lr 1e39 --max-update 1")
    assert not (tmp_path / "checkpoint_last.pt").exists()


def test_other_mistakes_stay_what_they_are(train, tmp_path, monkeypatch):
    def train_step(*arguments, **options):
        raise ValueError("another")

    monkeypatch.setattr("lsq.fairseq.task.LSQTranslationTask.train_step", train_step)
    with pytest.raises(ValueError, match="^another$"):
        train(tmp_path)


def test_data_parallel_on_the_cpu_ignores_the_device(group):
    assert CPUSafeDataParallel(nn.Linear(2, 2), device_ids=[0], output_device=0).device_ids is None


def test_replaced_puts_everything_back():
    class Module:
        one, two = 1, 2

    with pytest.raises(KeyError), compatibility.replaced(Module, one=10, two=20):
        assert (Module.one, Module.two) == (10, 20)
        raise KeyError
    assert (Module.one, Module.two) == (1, 2)
