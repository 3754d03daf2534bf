import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq_cli import train as fairseq_train
from torch import distributed, nn

from lsq.dist import GradientConfig
from lsq.dist.config import MODES
from lsq.fairseq import gradients
from lsq.layers.module import ProgramModule
from tests.dist.processes import run
from tests.fairseq.two_workers import by_processes

OPTIONS = {
    "lsq_gradients": "int8",
    "lsq_gradients_node_size": None,
    "lsq_timeout": 600.0,
    "ddp_backend": "pytorch_ddp",
    "ddp_comm_hook": "none",
}


@pytest.fixture
def two_workers(group, monkeypatch):
    """As if there were two workers."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)


def options(**given) -> SimpleNamespace:
    return SimpleNamespace(**{**OPTIONS, **given})


def test_options_become_a_configuration(parse):
    args = parse()
    assert args.lsq_gradients == "none" and args.ddp_comm_hook == "none"
    args.lsq_gradients = "auto"
    assert gradients.configuration(args) == GradientConfig()
    args = parse("--lsq-gradients int8_hier --lsq-gradients-node-size 8 --lsq-timeout 30")
    assert gradients.configuration(args) == GradientConfig(
        mode="int8_hier", node_size=8, timeout_s=30.0
    )


@pytest.mark.thorough
def test_one_worker_is_told_once(train, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        train(tmp_path, "--lsq-gradients int8 --max-update 4 --max-tokens 400")
    assert caplog.text.count("--lsq-gradients int8 has nothing to do: there is one worker") == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ddp_backend": "legacy_ddp"}, "works with --ddp-backend pytorch_ddp or c10d, but legacy"),
        ({"ddp_comm_hook": "fp16"}, "--lsq-gradients int8 and --ddp-comm-hook fp16 are two ways"),
        ({}, "needs fairseq's data parallel training, but the model is not wrapped.*--use-bmuf"),
        ({"lsq_gradients_node_size": 0}, "int8 and its options: node_size is 0"),
        ({"lsq_gradients": "int4"}, "--lsq-gradients int4 and its options: mode is 'int4'"),
    ],
)
def test_unusable_options(two_workers, given, message):
    with pytest.raises(ValueError, match=message):
        gradients.install(options(**given), nn.Linear(2, 2))


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_unusable_timeout(seconds):
    with pytest.raises(ValueError, match="--lsq-timeout is .*; it must be a number of seconds"):
        gradients.limit_waiting(seconds)


def _train(rank: int, args, runs: list[tuple[Path, str, dict]]) -> list:
    """Train one after another in the same processes: (save folder, mode, further options) each.

    Returns:
        of each: the mode that came of it and this process's parameters
    """
    found = []
    step = gradients.GradientTask.train_step
    for folder, mode, given in runs:
        trained = []

        def noting(task, sample, model, *rest, trained=trained):
            trained[:] = [task, model]
            return step(task, sample, model, *rest)

        gradients.GradientTask.train_step = noting
        own = {"save_dir": str(folder), "lsq_gradients": mode, "distributed_rank": rank}
        own["distributed_world_size"] = distributed.get_world_size()
        vars(args).update(own | given)
        distributed_utils.call_main(convert_namespace_to_omegaconf(args), fairseq_train.main)
        task, model = trained
        for module in model.modules():
            if isinstance(module, ProgramModule):
                # as writing a checkpoint does in the first process, and the next pass in all
                module.bring_clips_up()
        parameters = {name: value.detach() for name, value in model.named_parameters()}
        found.append((task.compression.mode if task.compression else None, parameters))
    return found


@pytest.fixture
def workers(parse):
    """workers(number, runs, "--option value ...") -> what `_train` returned in each process."""

    def workers(number: int, runs: list[tuple[Path, str, dict]], arguments: str = "") -> list[list]:
        return run(_train, number, by_processes(parse(arguments)), runs)

    return workers


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference of two models' parameters."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arch", "criterion", "modes"),
    [
        ("lsq_transformer", "lsq_label_smoothed_cross_entropy", ("int8", "auto")),
        ("transformer", "label_smoothed_cross_entropy", MODES),
    ],
)
def test_every_mode_trains(workers, tmp_path, arch, criterion, modes):
    """With lsq's and with fairseq's own transformer; all workers keep the same parameters."""
    modes = ["none", *modes]
    nodes = {
        mode: {"lsq_gradients_node_size": 1 if mode.endswith("_hier") else None} for mode in modes
    }
    runs = [(tmp_path / mode, mode, nodes[mode]) for mode in modes]
    first, second = workers(2, runs, f"--arch {arch} --criterion {criterion} --max-update 3")
    found = {mode: result[0] for mode, result in zip(modes, first, strict=True)}
    assert found.pop("auto") in ("float", "bf16", "int8", "int8_hier", "lean")
    assert found == {mode: None if mode == "none" else mode for mode in found}
    # clips are measured anew meanwhile
    weights = {name for name in first[0][1] if "clip" not in name}
    for mode, one, other in zip(modes, first, second, strict=True):
        assert apart(one[1], other[1]) == 0, mode
        assert (tmp_path / mode / "checkpoint_last.pt").exists()
        plain = {name: first[0][1][name] for name in weights}
        # Adam's first updates move a parameter by the learning rate at most, whatever the size of
        # its gradient
        moved = apart({name: one[1][name] for name in weights}, plain)
        assert (0 if mode in ("none", "auto") else 1e-9) <= moved <= 6.1 * 0.003, mode
