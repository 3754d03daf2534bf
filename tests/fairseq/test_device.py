"""--lsq-device and --lsq-activations: where layers compute, and that they compute the same
everywhere."""

import logging
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import train as fairseq_train

from lsq.fairseq import device
from lsq.fairseq.compatibility import checkpoints
from lsq.fairseq.task import LSQTranslationTask
from lsq.layers import ProgramModule
from lsq.run.backends import backend
from tests.fairseq.comparison import assert_same_steps
from tests.fairseq.conftest import SHORT, TINY
from tests.fairseq.test_task import command
from tests.fairseq.two_workers import train_by_two

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
    "arguments, message",
    [
        ("--lsq-device cuda", "--lsq-device cuda: --cpu was given, too; leave one of them out"),
        ("--lsq-activations bfloat16", "--lsq-activations bfloat16 is for cuda and the emulator"),
    ],
)
def test_what_does_not_work_is_refused(build, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(arguments)


def test_without_cpu_where_fairseq_would_take_the_gpu(parse):
    for name in ("cpu", "emulator"):
        args = parse(f"--lsq-device {name}")
        with pytest.raises(ValueError, match=f"--lsq-device {name} needs fairseq's --cpu as well"):
            device.check(args, on_cpu=False)


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


@pytest.fixture
def losses(monkeypatch):
    """The losses of all batches, of training and of validation."""
    found = []

    def noting(name: str) -> None:
        original = getattr(LSQTranslationTask, name)

        def step(*arguments, **more):
            result = original(*arguments, **more)
            found.append(float(result[2]["loss"]))
            return result

        monkeypatch.setattr(LSQTranslationTask, name, step)

    noting("train_step")
    noting("valid_step")
    return found


@pytest.fixture
def run(toy, losses, monkeypatch):
    """run(folder, updates, options) trains with validations; the losses of its batches.

    nudge: seeds what moves each initial weight by a last bit or none.
    """
    build_model = LSQTranslationTask.build_model

    def run(folder: Path, updates: int, arguments: str = "", *, nudge: int) -> torch.Tensor:
        def build(*given, **more):
            model, generator = build_model(*given, **more), torch.Generator().manual_seed(nudge)
            for weight in model.state_dict().values():
                if weight.is_floating_point():
                    weight.mul_(1 + 1e-7 * (2 * torch.rand(weight.shape, generator=generator) - 1))
            return model

        monkeypatch.setattr(LSQTranslationTask, "build_model", build)
        losses.clear()
        given = [word for word in SHORT if word != "--disable-validation"]
        given += (
            f"--adam-eps 0.001 --max-update {updates} --save-interval-updates 2 --save-dir {folder}"
        ).split()
        args = options.parse_args_and_arch(
            options.get_training_parser(), [str(toy), *TINY, *given, *arguments.split()]
        )
        try:
            fairseq_train.main(convert_namespace_to_omegaconf(args))
        finally:
            checkpoints.release_folder()
        return torch.tensor(losses)

    return run


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "activations, each, tolerance", [("float32", 3e-3, 3e-4), ("bfloat16", 6e-3, 1e-3)]
)
def test_a_training_in_the_emulator_is_that_of_the_cpu(run, tmp_path, activations, each, tolerance):
    """With validations and a resume in between; and it goes on on the CPU.

    A batch has about a hundred words: one code that differs changes its loss by a thousandth soon,
    and bfloat16 changes more of them. Mean losses of trainings whose weights began a last bit apart
    differ by 1.5e-4 (the standard deviation of 16 on the CPU, and of 8 in the emulator), so that
    means of several are compared.
    """
    wanted = torch.stack(
        [run(tmp_path / f"cpu{nudge}", 5, nudge=nudge) for nudge in range(8)]
    ).mean(dim=0)
    emulated = f"{EMULATOR} --lsq-activations {activations}"
    trainings = []
    for nudge in range(3):
        begun = run(tmp_path / f"emulated{nudge}", 4, emulated, nudge=nudge)
        shutil.copytree(tmp_path / f"emulated{nudge}", tmp_path / f"moved{nudge}")
        found = run(tmp_path / f"emulated{nudge}", 5, emulated, nudge=nudge)
        moved = run(tmp_path / f"moved{nudge}", 5, nudge=nudge)
        trainings += [torch.cat([begun, found]), torch.cat([begun, moved])]
    for losses in trainings:
        torch.testing.assert_close(losses, wanted, rtol=each, atol=0)
        assert (losses / wanted - 1).square().mean().sqrt() < 2e-3
    torch.testing.assert_close(torch.stack(trainings).mean(), wanted.mean(), rtol=tolerance, atol=0)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "arguments",
    [
        "--attention-dropout 0.1 --activation-dropout 0.1",
        "--encoder-normalize-before --decoder-normalize-before --activation-fn gelu",
        "--lsq-backward float",
        "--lsq-clip-gradient lsq --lsq-weight-granularity tensor",
    ],
)
def test_codes_in_the_emulator_are_those_of_the_cpu(build, batch, monkeypatch, arguments):
    assert_same_steps(build, batch, arguments, EMULATOR, monkeypatch)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_two_processes_in_the_emulator_exchange_codes(toy, tmp_path):
    given = f"--max-update 2 --lsq-gradients int8 {EMULATOR}"
    log, (first, second) = train_by_two(
        tmp_path, command(toy, tmp_path / "save", given), seconds=500
    )
    assert "gradients: int8 between 2 workers" in log
    assert all(torch.equal(first[name], second[name]) for name in first)
