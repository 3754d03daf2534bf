"""Who is gone from a training on a device with streams, whose exchanges go on while the host runs
ahead."""

import json
import os
import signal
import socket
from datetime import timedelta

import pytest
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from lsq.dist import compress_gradients, roll_call
from lsq.dist.agreement import any_process
from lsq.dist.roll_call import ExchangeFailed, naming_the_lost
from tests.device import build, group
from tests.device.standin import PLACE
from tests.dist.net import Net, batch, config
from tests.dist.processes import CONTEXT
from tests.sampling import first

WORKERS, LOST, STEP = 3, 1, 2


@pytest.fixture(autouse=True, scope="module")
def device() -> None:
    try:
        build.library()
    except build.CannotBuild as error:
        pytest.skip(str(error))


def train(rank: int, folder: str, mode: str, last_words: str | None) -> None:
    """Steps of DDP; at one of them a process is killed, or fails with `last_words`.

    The others write what they saw.
    """
    group.register()
    distributed.init_process_group(
        group.NAME,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORKERS,
        timeout=timedelta(seconds=30),
    )
    roll_call.PERIOD_S = 0.05
    roll_call.register()
    model = DistributedDataParallel(Net().to(PLACE), bucket_cap_mb=0.001)
    compress_gradients(model, config(mode))
    try:
        with naming_the_lost():
            for step in range(100):
                if (rank, step) == (LOST, STEP):
                    if last_words is not None:
                        raise ValueError(last_words)
                    os.kill(os.getpid(), signal.SIGKILL)
                model(batch(rank, step).to(PLACE)).square().sum().backward()
                any_process(False, PLACE)
    except ExchangeFailed as error:
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump([step, type(error).__name__, str(error)], file)
    finally:
        os._exit(0)  # without the group's own farewell, which needs the others


@pytest.mark.parametrize(
    ("mode", "last_words"), first([("int8", None), ("bf16", "sentence 7 is too long")], 1)
)
def test_the_survivors_name_the_one_that_is_gone(tmp_path, mode, last_words):
    started = [
        CONTEXT.Process(target=train, args=(rank, str(tmp_path), mode, last_words))
        for rank in range(WORKERS)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
        process.kill()
        process.join()
    for rank in {*range(WORKERS)} - {LOST}:
        step, kind, message = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (step, kind) == (STEP, "RankLost")
        place = f"host {socket.gethostname()}, process id {started[LOST].pid}"
        ended = "" if last_words is None else f"; rank {LOST} ended with ValueError: {last_words}"
        assert message.startswith(
            f"rank {LOST} (of {WORKERS}, {place}) no longer answers{ended}: gloo"
        ), message
