"""transformers' Trainer and accelerate in two processes, with gradients in int8."""

import logging
import os
from pathlib import Path

import pytest
import torch
from torch import distributed

from lsq.dist import GradientConfig, compress_gradients
from lsq.models import LsqCallback, average_clips
from tests.dist.processes import run
from tests.models.trainings import converted, data, losses, trainer

from accelerate import Accelerator  # isort: skip

TIMEOUT = 280.0


def launched(rank: int) -> None:
    """As torchrun would have started this process."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(distributed.get_world_size()),
    }
    os.environ |= {
        "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"],
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    logging.getLogger("lsq").setLevel(logging.INFO)


def by_trainer(rank: int, folder: str) -> dict:
    launched(rank)
    options = {
        "max_steps": 6,
        "save_steps": 3,
        "per_device_train_batch_size": 4,
        "ddp_backend": "gloo",
    }
    callback = LsqCallback(gradients=GradientConfig(mode="int8"))
    training = trainer("bert", Path(folder), callback, **options)
    training.train()
    distributed.barrier()
    model = converted("bert", seed=7)
    later = trainer(
        "bert",
        Path(folder) / "later",
        LsqCallback(gradients={"mode": "int8"}),
        model=model,
        **options,
    )
    later.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-3"))
    return {
        "mode": callback.compression.mode,
        "state": training.model.state_dict(),
        "losses": losses(training),
        "later": later.model.state_dict(),
        "later losses": losses(later),
    }


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_trainer_in_two_processes(tmp_path):
    first, second = run(by_trainer, 2, str(tmp_path), timeout=TIMEOUT)
    assert first["mode"] == "int8"
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name
        assert torch.equal(value, first["later"][name]), name
    assert first["losses"] == first["later losses"]


def by_accelerate(rank: int, folder: str) -> list:
    launched(rank)
    accelerator = Accelerator(cpu=True)
    model = converted("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    average_clips(accelerator.unwrap_model(model))
    mode = compress_gradients(model, GradientConfig(mode="int8")).mode
    found = []
    for example in data("gpt2", 8)[rank::2]:
        words = example["input_ids"][None]
        loss = model(input_ids=words, labels=words).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    state = {
        name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()
    }
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    accelerator.load_state(folder)
    again = accelerator.unwrap_model(model).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in state.items())
    return [mode, found, state]


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_accelerate_in_two_processes(tmp_path):
    first, second = run(by_accelerate, 2, str(tmp_path), timeout=TIMEOUT)
    assert first[0] == "int8"
    for name, value in first[2].items():
        assert torch.equal(value, second[2][name]), name
    assert first[1][-1] < first[1][0]
