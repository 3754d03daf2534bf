"""Trainings of several processes on one machine: started, failing, resumed."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lsq.commands.launch import ONE_MACHINE
from lsq.commands.user_dir import user_dir
from tests.commands import dying
from tests.commands.conftest import TRAINING
from tests.dist.processes import CONTEXT

ROOT = Path(__file__).resolve().parents[2]
LSQ = [sys.executable, "-m", "lsq.commands.cli"]
GRADIENTS = "--disable-validation --lsq-gradients int8".split()
OPTIONS = [*TRAINING, *GRADIENTS, "--save-interval-updates", "2", "--cpu"]


def updates(folder: Path) -> int:
    return torch.load(folder / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]


def torchrun(
    processes: int, *command: str, restarts: int = 0, timeout: float = 190
) -> subprocess.CompletedProcess:
    launcher = [sys.executable, "-m", "torch.distributed.run", *ONE_MACHINE, "--no-python"]
    launcher += ["--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    options = {"capture_output": True, "text": True, "timeout": timeout, "cwd": ROOT}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, *command], env=environment, **options)


def training(data: Path, folder: Path, *options: str) -> list[str]:
    return [str(data), "--save-dir", str(folder), *OPTIONS, *options]


def dying_of(number: int, rank: int) -> list[str]:
    """`lsq train` in which a process gets a signal after 3 updates."""
    return [sys.executable, "-m", "tests.commands.dying", str(int(number)), str(rank), "3"]


def _process(rank: int, port: int, folder: Path, arguments: list[str]) -> None:
    """One of two processes, as torchrun would start them; process 1 dies after 3 updates."""
    torch.set_num_threads(1)
    with (folder / f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    of_torchrun["MASTER_ADDR"] = "127.0.0.1"
    os.environ.update({name: str(value) for name, value in of_torchrun.items()})
    sys.exit(dying.main(signal.SIGKILL, 1, 3, arguments))


@pytest.mark.thorough
def test_a_killed_process_is_named_and_the_training_goes_on_alone(prepared, lsq_train, tmp_path):
    model = tmp_path / "model"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = port, tmp_path, training(prepared.data, model, "--max-update", "6")
    processes = [CONTEXT.Process(target=_process, args=(rank, *given)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        process.kill()
    assert processes[1].exitcode == -signal.SIGKILL and processes[0].exitcode == 1
    log = (tmp_path / "0.log").read_text()
    (said,) = [line for line in log.splitlines() if line.startswith("lsq train: ")]
    lost = f"rank 1 (of 2, host {socket.gethostname()}, process id {processes[1].pid})"
    assert said.startswith(f"lsq train: error: {lost} no longer answers: gloo: ")
    assert "Traceback" not in log and updates(model) == 2
    assert not list(model.glob(".*.partial")) and not (model / "crash.pt").exists()
    lsq_train(model, *GRADIENTS, "--max-update", "5")
    assert updates(model) == 5
    log = (model / "train.log").read_text()
    said = "the checkpoint is of 2 processes, and now there are 1: of epoch 1, 4 batches are done"
    assert said in log
    assert "--lsq-gradients int8 has nothing to do: there is one worker" in log


@pytest.mark.thorough
def test_fairseq_train_under_torchrun(prepared, tmp_path):
    """As fairseq starts it on a CPU: each process is told its rank."""
    options = (
        "--arch lsq_transformer --task lsq_translation --criterion lsq_label_smoothed_cross_entropy"
        " --max-update 2 --distributed-world-size 2 --distributed-no-spawn --distributed-backend"
        f" gloo --distributed-init-method env:// --save-dir {tmp_path} --user-dir {user_dir()}"
    )
    program = f"{sys.executable} -m fairseq_cli.train"
    script = f'exec {program} "$0" "$@" --distributed-rank "$RANK" --device-id "$LOCAL_RANK"'
    done = torchrun(2, "bash", "-c", script, str(prepared.data), *OPTIONS, *options.split())
    assert done.returncode == 0, done.stderr[-2000:]
    assert "gradients: int8 between 2 workers" in done.stdout + done.stderr
    assert updates(tmp_path) == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_four_processes_of_which_one_is_lost(prepared, tmp_path, number):
    """Survivors name it within the timeout; torchrun kills a stopped one half a minute later."""
    options = ["--lsq-timeout", "10", "--max-update"]
    command = training(prepared.data, tmp_path, *options, "8")
    done = torchrun(4, *dying_of(number, 2), *command)
    assert done.returncode == 1
    lost = r"rank 2 \(of 4, host \S+, process id \d+\) no longer answers: gloo: .+"
    named = re.findall(f"^lsq train: error: {lost}$", done.stderr, re.MULTILINE)
    assert len(named) == 3, done.stderr
    assert "Traceback" not in done.stderr.partition("torch/distributed/elastic")[0]
    assert updates(tmp_path) == 2 and not list(tmp_path.glob(".*.partial"))
    done = torchrun(3, *LSQ, "train", *training(prepared.data, tmp_path, *options, "6"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert updates(tmp_path) == 6
    assert "of 4 processes, and now there are 3: of epoch 1, 6 batches are done" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_starts_a_training_again_that_goes_on_from_the_checkpoint(prepared, tmp_path):
    """Though its agent keeps one store, with the addresses of the dead."""
    command = training(prepared.data, tmp_path, "--max-update", "6", "--lsq-timeout", "10")
    done = torchrun(2, *dying_of(signal.SIGKILL, 1), *command, restarts=1)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"rank 1 \(of 2, host \S+, process id \d+\) no longer answers", done.stderr)
    said = f"Loaded checkpoint {tmp_path}/checkpoint_last.pt (epoch 1 @ 2 updates)"
    assert said in done.stdout + done.stderr
    assert updates(tmp_path) == 6


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_sigterm_to_torchrun_writes_one_checkpoint(prepared, tmp_path):
    """What a cluster sends before it takes the machine away."""
    command = training(prepared.data, tmp_path, "--max-update", "8")
    done = torchrun(4, *dying_of(signal.SIGTERM, 1), *command)
    assert done.returncode == 1 and "stopped by SIGTERM after 4 updates; wrote " in done.stderr
    assert updates(tmp_path) == 4
    command = training(prepared.data, tmp_path, "--max-update", "5")
    done = torchrun(4, *LSQ, "train", *command)
    assert done.returncode == 0, done.stderr[-2000:]
    assert updates(tmp_path) == 5
