"""DeepSpeed's ZeRO, the real package: converted models train as without it, or are refused."""

import os
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

import lsq
from lsq import QuantConfig
from lsq.dist import roll_call
from lsq.dist.roll_call import RankLost
from lsq.models import average_clips
from tests.dist.processes import ProcessFailed, run

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        find_spec("deepspeed") is None,
        reason="for DeepSpeed: pip install deepspeed (beside it, accelerate behaves otherwise)",
    ),
]
WORKERS, STEPS = 2, 10


def converted(clips: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    lsq.convert(model, QuantConfig(clips=clips))
    return model


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * rank + step))


def clips_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters() if "clip" in name}


def plain(clips: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of a training in one process on the batches of all, and clips."""
    model = converted(clips)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(STEPS):
        every = [model(batch(rank, step)).square().mean() for rank in range(WORKERS)]
        loss = sum(every) / WORKERS
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.state_dict()  # brings clips up to date
    return losses, clips_of(model)


def engine_of(rank: int, stage: int, clips: str, measured: bool) -> nn.Module:
    """A model under ZeRO; `measured`: a batch ran before `initialize`."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(WORKERS)}
    import deepspeed

    # it would compile C++ for its own collectives, and leave locks behind when it is killed
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo")
    model = converted(clips)
    if measured:
        model(batch(0, 0))
    average_clips(model)
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def under_zero(rank: int, stage: int, clips: str, measured: bool) -> tuple:
    """(losses, clips) of a training."""
    engine, losses = engine_of(rank, stage, clips, measured), []
    for step in range(STEPS):
        loss = engine(batch(rank, step)).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        losses.append(mean.item() / WORKERS)
    if stage < 3:
        engine.module.state_dict()
    return losses, clips_of(engine.module)


@pytest.mark.parametrize(
    ("stage", "clips", "measured"),
    [(1, "absmax", False), (2, "absmax", False), (3, "absmax", True)]
    + [(stage, "learned", True) for stage in (1, 2, 3)],
)
def test_zero_trains_as_one_process_does(stage, clips, measured):
    losses, wanted = plain(clips)
    (found, own), (again, other) = run(under_zero, WORKERS, stage, clips, measured)
    assert found == again
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=0.01, atol=0)
    assert found[-1] < 0.6 * found[0]
    if stage == 3:
        return  # it keeps clips in parts between passes
    for name, clip in own.items():
        assert torch.equal(clip, other[name]), name
        if clips == "absmax":
            torch.testing.assert_close(clip, wanted[name], rtol=0.05, atol=0)


@pytest.mark.parametrize(("stage", "clips"), [(1, "learned"), (2, "learned"), (3, "absmax")])
def test_a_model_that_has_measured_nothing_is_refused_with_the_line_to_add(stage, clips):
    message = r"Add a line that runs one batch, model\(\*\*batch\), before deepspeed.initialize"
    with pytest.raises(AssertionError, match=message):
        run(under_zero, WORKERS, stage, clips, False)


def dying(rank: int, folder: str) -> None:
    """Rank 1 is killed after 3 steps."""
    roll_call.PATIENCE_S = 1.0
    roll_call.register()
    engine = engine_of(rank, 2, "absmax", False)
    with pytest.raises(RankLost) as lost, roll_call.naming_the_lost():
        for step in range(6):
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            engine.backward(engine(batch(rank, step)).square().mean())
            engine.step()
    Path(folder, "said").write_text(str(lost.value))


def test_a_killed_process_is_named(tmp_path):
    with pytest.raises(ProcessFailed, match="rank 1 ended without a result"):
        run(dying, 2, str(tmp_path))
    said = (tmp_path / "said").read_text()
    assert re.match(r"rank 1 \(of 2, host .*\) no longer answers: gloo", said), said
