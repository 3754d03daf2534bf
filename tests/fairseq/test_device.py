"""--lsq-device and --lsq-activations: where layers compute, and that they compute the same
everywhere."""

import logging
from argparse import Namespace

import pytest
import torch

from lsq.fairseq import device
from lsq.layers import ProgramModule
from lsq.run.backends import backend
from tests.fairseq.comparison import assert_equal_states
from tests.fairseq.test_task import command
from tests.fairseq.two_workers import train_by_two
from tests.sampling import first

EMULATOR = "--lsq-device emulator"


def backends_of(model) -> set:
    return {module.backend for module in model.modules() if isinstance(module, ProgramModule)}


@pytest.mark.parametrize(
    "arguments, activations",
    [
        ("", None),
        ("--lsq-device cpu", None),
        ("--lsq-device cpu --lsq-activations float32", None),
        (EMULATOR, torch.float32),
        (f"{EMULATOR} --lsq-activations bfloat16", torch.bfloat16),
    ],
)
def test_every_layer_computes_there(build, arguments, activations):
    _, model = build(arguments)
    assert backends_of(model) == {None if activations is None else backend("emulated", activations)}


@pytest.mark.parametrize(
    "arguments, on_cpu, message",
    [
        ("--lsq-device cuda", True, "--lsq-device cuda: --cpu was given, too; leave one of them"),
        ("--lsq-activations bfloat16", True, "bfloat16 is for cuda and the emulator"),
        ("--lsq-device cpu", False, "--lsq-device cpu needs fairseq's --cpu as well"),
        (EMULATOR, False, "--lsq-device emulator needs fairseq's --cpu as well"),
    ],
)
def test_what_does_not_work_is_refused(parse, build, arguments, on_cpu, message):
    with pytest.raises(ValueError, match=message):
        build(arguments) if on_cpu else device.check(parse(arguments), on_cpu=False)


def test_a_checkpoint_of_another_device_can_be_loaded(build, parse):
    """Tasks are made of what stands in checkpoints, too."""
    task, _ = build()
    task.cfg.lsq_device = "cuda"
    assert backends_of(task.build_model(parse(), from_checkpoint=True)) == {None}


@pytest.mark.parametrize("fault", ["there is no GPU", None])
def test_the_log_says_where_and_why(train, tmp_path, caplog, monkeypatch, fault):
    monkeypatch.setattr(device, "gpu_fault", lambda: fault)
    with caplog.at_level(logging.INFO, logger=device.__name__):
        train(tmp_path / "default", "--max-update 1")
        train(tmp_path / "asked", "--max-update 1 --lsq-device cpu")
        train(
            tmp_path / "fairseq",
            "--max-update 1 --arch transformer --criterion label_smoothed_cross_entropy",
        )
    said = [record.getMessage() for record in caplog.records if record.name == device.__name__]
    where = "layers compute on cpu, activations in float32"
    assert said == [f"{where}: {fault or '--cpu was given'}", where]


def test_the_log_says_what_is_decoded(build, caplog):
    _, model = build(
        "--lsq-activation-format int8,decoder.layers.0.*fc2*=nvfp4 --lsq-gradient-format int8"
    )
    with caplog.at_level(logging.INFO, logger=device.__name__):
        device.report(model, Namespace(lsq_device="cpu"))
    assert caplog.records[-1].getMessage() == (
        "multiplied as decoded values, no faster than floats: int8/row (7 weights), int8/tensor (9"
        " activations), "
        "nvfp4 (1 activation)"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "activations, tolerance", first([("bfloat16", 6e-3), ("float32", 3e-3)], 0, 1)
)
def test_a_training_in_the_emulator_is_that_of_the_cpu(
    train,
    losses,
    tmp_path,
    activations,
    tolerance,
):
    """And it goes on on the CPU. A batch has about a hundred words: one code that differs changes
    its loss by a thousandth soon, and bfloat16 changes more of them."""
    given = "--adam-eps 0.001 --max-update"
    train(tmp_path / "cpu", f"{given} 5")
    train(tmp_path / "moved", f"{given} 4 {EMULATOR} --lsq-activations {activations}")
    train(tmp_path / "moved", f"{given} 5")
    assert losses[5:] == pytest.approx(losses[:5], rel=tolerance)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_two_processes_in_the_emulator_exchange_codes(toy, tmp_path):
    given = f"--max-update 2 --lsq-gradients int8 {EMULATOR}"
    log, (first, second) = train_by_two(command(toy, tmp_path / "save", given), seconds=500)
    assert "gradients: int8 between 2 workers" in log
    assert_equal_states(first, second)
