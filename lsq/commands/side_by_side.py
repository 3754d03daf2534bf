"""Several `lsq train-text` at the same time, each in a process of its own, with a progress bar for each."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from lsq.commands.interruption import Interrupted, Interruption
from lsq.commands.losses import LOSSES, read_losses

POLL_SECONDS = 0.3
OUTPUT = "output.txt"
"""What a process printed, in its folder's parent as <name>-output.txt."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One process."""

    name: str
    arguments: list[str]
    """Of `lsq`."""
    folder: Path
    """Where it writes results.json and model/losses.jsonl."""
    updates: int

    @property
    def output(self) -> Path:
        """The file of what it prints."""
        return self.folder.with_name(f"{self.name}-{OUTPUT}")


def train_side_by_side(trainings: list[Training], *, threads: int, quiet: bool) -> dict[str, dict]:
    """Run them all, with `threads` threads each, and wait.

    Returns:
        The content of each one's results.json, by name.

    Raises:
        ChildProcessError: one failed; the others are stopped.
        Interrupted: SIGINT or SIGTERM came; the processes have stopped, each with a checkpoint.
    """
    with Interruption() as interruption, contextlib.ExitStack() as stack:
        interruption.defer()
        bars = [
            stack.enter_context(
                tqdm(
                    total=training.updates,
                    desc=f"{training.name:6}",
                    unit=" updates",
                    position=position,
                    disable=quiet or None,
                )
            )
            for position, training in enumerate(trainings)
        ]
        processes = stack.enter_context(_started(trainings, threads))
        failed = None
        while failed is None and any(process.poll() is None for process in processes):
            for bar, training in zip(bars, trainings, strict=True):
                _show(bar, training)
            if interruption.requested is not None:
                break
            time.sleep(POLL_SECONDS)
            failed = next((pair for pair in zip(trainings, processes, strict=True) if pair[1].poll()), None)
    if interruption.requested is not None:
        raise Interrupted(
            interruption.requested, "stopped; run the same command again to continue from the last checkpoints"
        )
    if failed is not None:
        training, process = failed
        lines = training.output.read_text(encoding="utf-8").strip().splitlines() or ["it printed nothing"]
        raise ChildProcessError(
            f"the run {training.name} ended with status {process.returncode}: {lines[-1]}"
            f" (all it printed is in {training.output})"
        )
    return {
        training.name: json.loads((training.folder / "results.json").read_text(encoding="utf-8"))
        for training in trainings
    }


@contextlib.contextmanager
def _started(trainings: list[Training], threads: int) -> Iterator[list[subprocess.Popen]]:
    """Start a process for each; at the end those that still run are told to write a checkpoint and stop."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    processes = []
    try:
        for training in trainings:
            with training.output.open("w", encoding="utf-8") as output:
                command = [sys.executable, "-m", "lsq.cli", *training.arguments]
                processes.append(
                    subprocess.Popen(
                        command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait()


def _show(bar: tqdm, training: Training) -> None:
    curve = read_losses(training.folder / "model" / LOSSES)
    if curve.training:
        bar.set_postfix(loss=f"{next(reversed(curve.training.values())):.2f}", refresh=False)
    bar.update(curve.updates - bar.n)
