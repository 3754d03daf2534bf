"""Processes of one benchmark on one machine, joined by gloo."""

import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, multiprocessing

TIMEOUT = timedelta(minutes=5)
"""A process that waits longer for another gives up."""


def run(work: Callable, processes: int, *arguments, threads: int = 1) -> list:
    """Call `work(rank, *arguments)` in every process of a fresh group.

    Args:
        work: a function of a module; what it returns is pickled.
        processes: how many.
        threads: of each process.

    Returns:
        What the processes returned, by rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: `work` failed in one of them; the others are
        ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(
            _process, (processes, Path(folder), threads, work, arguments), nprocs=processes
        )
        return [pickle.loads(_answer(Path(folder), rank).read_bytes()) for rank in range(processes)]


def _process(
    rank: int, processes: int, folder: Path, threads: int, work: Callable, arguments: tuple
) -> None:
    torch.set_num_threads(threads)
    join(rank, processes, folder)
    try:
        answer = work(rank, *arguments)
        _answer(folder, rank).write_bytes(pickle.dumps(answer))
    finally:
        distributed.destroy_process_group()


def join(rank: int, processes: int, folder: Path) -> None:
    """Make this process number `rank` of the group that meets in `folder`, a folder that all of
    them see."""
    store = distributed.FileStore(str(folder / "store"), processes)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=processes, timeout=TIMEOUT
    )


def _answer(folder: Path, rank: int) -> Path:
    return folder / f"answer{rank}.pickle"
