import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq_cli import train as fairseq_train
from torch import distributed, nn

from lsq.dist import GradientCompression, GradientConfig
from lsq.dist.config import MODES
from lsq.fairseq import gradients
from lsq.fairseq.compatibility import CPUSafeDataParallel
from lsq.layers.module import ProgramModule
from tests.dist.processes import run

OPTIONS = {
    "lsq_gradients": "int8",
    "lsq_gradients_block": 256,
    "lsq_gradients_rounding": None,
    "lsq_gradients_error_feedback": False,
    "lsq_gradients_node_size": None,
    "lsq_timeout": 600.0,
    "ddp_backend": "pytorch_ddp",
    "ddp_comm_hook": "none",
    "seed": 1,
}


@pytest.fixture
def two_workers(group, monkeypatch):
    """As if there were two workers."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)


def options(**given) -> SimpleNamespace:
    return SimpleNamespace(**{**OPTIONS, **given})


def test_defaults_are_those_of_lsq_dist(parse):
    args = parse()
    assert args.lsq_gradients == "none" and args.ddp_comm_hook == "none"
    args.lsq_gradients = "auto"
    args.seed = 0
    assert gradients.configuration(args) == GradientConfig()


def test_options_become_a_configuration(parse):
    args = parse(
        "--lsq-gradients int4_hier --lsq-gradients-block 64 --lsq-gradients-rounding nearest"
        " --lsq-gradients-error-feedback --lsq-gradients-node-size 8 --lsq-timeout 30 --seed 5"
    )
    assert gradients.configuration(args) == GradientConfig(
        mode="int4_hier",
        block=64,
        rounding="nearest",
        error_feedback=True,
        node_size=8,
        timeout_s=30.0,
        seed=5,
    )


@pytest.mark.thorough
def test_one_worker_is_told_once(train, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        train(tmp_path, "--lsq-gradients int8 --max-update 4 --max-tokens 400")
    assert caplog.text.count("--lsq-gradients int8 has nothing to do: there is one worker") == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"ddp_backend": "legacy_ddp"},
            "works with --ddp-backend pytorch_ddp or c10d, but legacy_ddp was given",
        ),
        ({"ddp_comm_hook": "fp16"}, "--lsq-gradients int8 and --ddp-comm-hook fp16 are two ways"),
        ({}, "needs fairseq's data parallel training, but the model is not wrapped.*--use-bmuf"),
        (
            {"lsq_gradients_block": 7},
            "--lsq-gradients int8 and its options: block is 7; allowed: 32, 64",
        ),
        (
            {"lsq_gradients": "gcq", "lsq_gradients_rounding": "stochastic"},
            "mode gcq rounds to nearest",
        ),
    ],
)
def test_unusable_options(two_workers, given, message):
    with pytest.raises(ValueError, match=message):
        gradients.install(options(**given), nn.Linear(2, 2))


def test_mistaken_mode(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--lsq-gradients int9")
    assert "--lsq-gradients" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_unusable_timeout(seconds):
    with pytest.raises(
        ValueError, match="--lsq-timeout is .*; it must be a number of seconds above 0"
    ):
        gradients.limit_waiting(seconds)


def test_the_wrapped_model_is_found(group):
    model = nn.Linear(2, 2)
    assert CPUSafeDataParallel.around(model) is None
    wrapped = CPUSafeDataParallel(model)
    assert CPUSafeDataParallel.around(model) is wrapped


class Texts(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _train(rank: int, args, runs: list[tuple[Path, str, dict]]) -> list:
    """Train one after another in the same processes: (save folder, mode, further options) each.

    Returns:
        of each: the mode that came of it, this process's parameters, the residuals that were
            loaded, what was logged
    """
    found = []
    step, load = gradients.GradientTask.train_step, GradientCompression.load_state_dict
    for folder, mode, given in runs:
        said, trained, loaded = Texts(), [], {}

        def noting(task, sample, model, *rest, trained=trained):
            trained[:] = [task, model]
            return step(task, sample, model, *rest)

        def noting_load(compression, state, loaded=loaded):
            loaded.update(state)
            load(compression, state)

        gradients.GradientTask.train_step, GradientCompression.load_state_dict = noting, noting_load
        logging.getLogger().addHandler(said)
        args.save_dir, args.lsq_gradients = str(folder), mode
        args.distributed_rank, args.distributed_world_size = rank, distributed.get_world_size()
        for name, value in given.items():
            setattr(args, name, value)
        distributed_utils.call_main(convert_namespace_to_omegaconf(args), fairseq_train.main)
        logging.getLogger().removeHandler(said)
        task, model = trained
        for module in model.modules():
            if isinstance(module, ProgramModule):
                # as writing a checkpoint does in the first process, and the next pass in all
                module.bring_clips_up()
        parameters = {name: value.detach() for name, value in model.named_parameters()}
        found.append(
            (task.compression.mode if task.compression else None, parameters, loaded, said.texts)
        )
    return found


@pytest.fixture
def workers(parse):
    """workers(number, runs, "--option value ...") -> what `_train` returned in each process."""

    def workers(number: int, runs: list[tuple[Path, str, dict]], arguments: str = "") -> list[list]:
        args = parse(arguments)
        args.distributed_init_method, args.distributed_no_spawn, args.distributed_backend = (
            "env://",
            True,
            "gloo",
        )
        return run(_train, number, args, runs)

    return workers


def residual_files(number: int) -> list[str]:
    return [
        f"checkpoint_last.gradients-rank-{rank}-of-{number}.safetensors" for rank in range(number)
    ]


def written(folder: Path) -> set[str]:
    """The names of the files in a folder of checkpoints, without the lock of processes that were
    killed."""
    return {file.name for file in folder.iterdir()} - {".lsq.lock"}


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
    expected = {mode: {"none": None, "auto": "bf16"}.get(mode, mode) for mode in modes}
    assert {mode: result[0] for mode, result in zip(modes, first, strict=True)} == expected
    # clips are measured anew meanwhile
    weights = {name for name in first[0][1] if "clip" not in name}
    for mode, one, other in zip(modes, first, second, strict=True):
        assert apart(one[1], other[1]) == 0, mode
        assert (tmp_path / mode / "checkpoint_last.pt").exists()
        plain = {name: first[0][1][name] for name in weights}
        # Adam's first updates move a parameter by the learning rate at most, whatever the size of
        # its gradient
        moved = apart({name: one[1][name] for name in weights}, plain)
        assert (0 if mode == "none" else 1e-9) <= moved <= 6.1 * 0.003, mode


@pytest.mark.thorough
def test_error_feedback_goes_with_the_checkpoints(workers, tmp_path):
    common = (
        "--lsq-gradients-error-feedback --arch transformer --criterion label_smoothed_cross_entropy"
    )
    runs = [(tmp_path, "int8", {"max_update": number}) for number in (2, 4)]
    for rank, (_, (_, parameters, loaded, texts)) in enumerate(workers(2, runs, common)):
        assert {
            f"module.module.{name.removeprefix('residual.')}" for name in loaded
        } == parameters.keys()
        assert sum(float(residual.abs().sum()) for residual in loaded.values()) > 0
        assert not any("starts from zero" in text for text in texts), rank
    assert written(tmp_path) == {"checkpoint_last.pt", *residual_files(2)}


@pytest.mark.thorough
def test_error_feedback_without_its_files_starts_from_zero(workers, tmp_path):
    """All workers do, and the first says so, once."""
    common = (
        "--lsq-gradients-error-feedback --arch transformer --criterion label_smoothed_cross_entropy"
    )
    workers(2, [(tmp_path, "int8", {"max_update": 2})], common)
    (tmp_path / residual_files(2)[1]).unlink()
    ((_, one, loaded, texts),), ((_, other, loaded_too, texts_too),) = workers(
        2, [(tmp_path, "int8", {"max_update": 3})], common
    )
    zero = [
        text
        for text in texts + texts_too
        if text.startswith("error feedback starts from zero: there is no file")
    ]
    assert len(zero) == 1 and "rank-1-of-2" in zero[0] and not loaded and not loaded_too
    assert apart(one, other) == 0
    ((_, _, loaded, texts),), *_ = workers(3, [(tmp_path, "int8", {"max_update": 4})], common)
    zero = [text for text in texts if "starts from zero" in text]
    assert (
        len(zero) == 1
        and zero[0].endswith("those here are of 2 workers, and now there are 3")
        and not loaded
    )
    assert written(tmp_path) == {"checkpoint_last.pt", *residual_files(3)}


def _refusal(rank: int, args, folder: Path) -> str:
    """What a training says that cannot go on."""
    with pytest.raises(ValueError) as refused:
        _train(rank, args, [(folder, "int8", {"max_update": 4})])
    return str(refused.value)


@pytest.mark.thorough
def test_damaged_residuals_of_one_worker_end_all(workers, parse, tmp_path):
    common = (
        "--lsq-gradients-error-feedback --arch transformer --criterion label_smoothed_cross_entropy"
    )
    workers(2, [(tmp_path, "int8", {"max_update": 2})], common)
    file = tmp_path / residual_files(2)[1]
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    args = parse(common)
    args.distributed_init_method, args.distributed_no_spawn, args.distributed_backend = (
        "env://",
        True,
        "gloo",
    )
    for said in run(_refusal, 2, args, tmp_path):
        assert (
            "rank-1-of-2.safetensors is damaged or cannot be read (its checksum does not fit); to"
            " start" in said
        )
    assert not (tmp_path / "crash.pt").exists()


def test_without_a_last_checkpoint_there_are_no_residuals(workers, tmp_path):
    workers(
        2, [(tmp_path, "int8", {"no_save": True})], "--lsq-gradients-error-feedback --max-update 1"
    )
    assert not written(tmp_path)
