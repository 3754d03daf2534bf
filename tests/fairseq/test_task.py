"""Training through fairseq: resumable to the bit, alone or with others, by the folder for
--user-dir."""

import gc
import logging
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from fairseq import utils
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lsq
from lsq.config import QuantConfig
from lsq.fairseq.model import PADDINGS, Paddings
from lsq.fairseq.task import with_paddings
from tests.fairseq.comparison import assert_equal_states, assert_resumes_to_the_bit
from tests.fairseq.conftest import SHORT, TINY
from tests.fairseq.two_workers import train_by_two

USER_DIR = Path(lsq.__file__).parent / "fairseq" / "user_dir" / "lsq_fairseq"


@pytest.mark.parametrize(
    "options",
    [
        "--lsq-backward int8 --update-freq 2",
        *(
            pytest.param(one, marks=pytest.mark.thorough)
            for one in ("--lsq-sparsity 2:4,every=2,begin=1", "", "--lsq-mode float")
        ),
    ],
)
def test_resuming_continues_to_the_bit(train, losses, tmp_path, options):
    assert_resumes_to_the_bit(train, tmp_path, options, (3, 6))
    assert losses[len(losses) // 2 :] == losses[: len(losses) // 2]


def test_user_dir_contains_one_folder_of_a_name_that_nobody_else_has():
    entries = [path.name for path in USER_DIR.parent.iterdir() if path.name != "__pycache__"]
    assert entries == ["lsq_fairseq"]


def command(toy, folder, options: str) -> list[str]:
    more = f"--user-dir {USER_DIR} --save-dir {folder} {options}"
    return [str(toy), *TINY, *SHORT, *more.split()]


@pytest.mark.thorough
def test_fairseq_train_needs_only_the_user_dir(toy, tmp_path):
    script = "import sys; from fairseq_cli.train import cli_main; sys.exit(cli_main())"
    given = [sys.executable, "-c", script, *command(toy, tmp_path, "--max-update 2")]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(given, env=one_thread, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "Quantised tensors at update 1" in done.stdout + done.stderr
    assert (tmp_path / "checkpoint_last.pt").exists()


@pytest.mark.parametrize(
    "criterion",
    [
        "lsq_label_smoothed_cross_entropy",
        pytest.param("label_smoothed_cross_entropy", marks=pytest.mark.thorough),
    ],
)
def test_two_processes_end_with_the_same_parameters(toy, tmp_path, criterion):
    given = command(toy, tmp_path / "save", f"--max-update 3 --criterion {criterion}")
    _, (first, second) = train_by_two(given)
    assert any(name.endswith("_clip") for name in first)
    assert_equal_states(first, second)


@pytest.mark.thorough
@pytest.mark.parametrize("clips", ["absmax", pytest.param("learned", marks=pytest.mark.thorough)])
def test_two_processes_share_clips_whatever_wraps_the_model(toy, tmp_path, clips):
    given = command(toy, tmp_path / "save", f"--max-update 3 --lsq-clips {clips}")
    _, (first, second) = train_by_two(given, ddp="legacy_ddp")
    assert_equal_states(first, second)


@pytest.mark.parametrize("checksums", ["x", {}, {"source": torch.zeros(3), "target": None}])
def test_checksums_of_dictionaries_that_are_none(build, checksums):
    task, _ = build()
    task.load_state_dict(task.state_dict())
    with pytest.raises(
        ValueError, match="has another source and target dictionary than the checkpoint was trained"
    ):
        task.load_state_dict({"lsq_dictionaries": checksums})


PAD = 1


def collate(samples):
    tokens = torch.tensor([[5, 6, PAD], [7, 8, 9]])
    return {"id": torch.tensor(samples), "net_input": {"src_tokens": tokens}} if samples else {}


def test_a_batch_has_its_paddings_on_the_cpu():
    collater = pickle.loads(pickle.dumps(partial(with_paddings, collate, PAD)))
    batch = collater([1, 2])
    assert batch[PADDINGS].src_tokens.tolist() == [[False, False, True], [False] * 3]
    assert batch[PADDINGS].prev_output_tokens is None and collater([]) == {}
    moved = utils.apply_to_sample(lambda tensor: tensor.to("meta"), batch)
    assert moved["net_input"]["src_tokens"].is_meta and moved[PADDINGS] is batch[PADDINGS]


def test_a_model_takes_paddings_instead_of_looking_at_the_tokens(build, batch):
    task, model = build("")
    inputs, target = batch(task)["net_input"], batch(task)["target"]
    paddings = Paddings(*(inputs[name].eq(PAD) for name in ("src_tokens", "prev_output_tokens")))
    model.eval()(**inputs)  # measures the clips
    losses = [model(**inputs, target=target, paddings=given)[0] for given in (None, paddings)]
    assert torch.equal(*losses)
    more = Paddings(torch.zeros_like(paddings.src_tokens), paddings.prev_output_tokens)
    assert not torch.equal(losses[0], model(**inputs, target=target, paddings=more)[0])


def test_batches_of_a_training_have_paddings(build):
    task, _ = build("")
    task.load_dataset("train")
    for _ in range(2):
        iterator = task.get_batch_iterator(
            task.dataset("train"), max_tokens=200, max_positions=(50, 50)
        )
        batch = next(iter(iterator.next_epoch_itr(shuffle=False)))
        for name in ("src_tokens", "prev_output_tokens"):
            padding = batch["net_input"][name] == task.source_dictionary.pad()
            assert torch.equal(getattr(batch[PADDINGS], name), padding)


@pytest.mark.thorough
def test_training_logs_signals_and_summary(train, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("lsq.observe.signals.LEAST_INTERVAL", 2)
    caplog.set_level(logging.INFO)
    train(
        tmp_path / "save", f"--max-update 3 --log-interval 2 --tensorboard-logdir {tmp_path}/board"
    )
    gc.collect()  # frees the task, part of a reference cycle, which then logs its summary
    assert caplog.text.count("Quantised tensors at update 2") == 1
    events = EventAccumulator(str(tmp_path / "board" / "lsq")).Reload()
    points = events.Scalars("zero_share/encoder.layers.0.self_attn.qkv_weight")
    assert [point.step for point in points] == [1, 2]
    caplog.clear()
    train(tmp_path / "float", "--max-update 1 --lsq-mode float")
    assert "Quantised tensors" not in caplog.text


def test_warnings_of_signals_name_options_of_fairseq(train, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(QuantConfig, "activation_clip", 0.01)
    train(tmp_path, "--max-update 1 --lsq-clip-init fixed --lsq-weight-granularity tensor")
    records = [record for record in caplog.records if record.name == "lsq.observe.signals"]
    warned = [record.getMessage() for record in records if record.levelno == logging.WARNING]
    assert warned and all("update 1: " in message for message in warned)
    assert any("or --lsq-clips absmax" in message for message in warned)
