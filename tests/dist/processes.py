"""Runs a function in several processes that share a process group, and brings back what it
returns."""

import datetime
import io
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed

# a fork of pytest itself would inherit OpenMP's dead threads
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "tests.dist.processes",
        "lsq.dist",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "lsq.commands.train",
        "transformers.models.llama.modeling_llama",
        "transformers.trainer",
    ]
)
"""What takes seconds to import, once for all processes; DDP imports torch._dynamo when it is made.
"""


class ProcessFailed(AssertionError):
    """A process raised something; the text is its traceback."""


def run(
    function: Callable,
    workers: int,
    *arguments,
    timeout: float = 90.0,
    backend: str = "gloo",
    prepare: Callable[[], None] | None = None,
    ends: bool = False,
) -> list:
    """[function(rank, *arguments) for each rank], each in a process of its own with the default
    group initialised.

    `function` must be at the top level of a module. What it returns goes through torch.save.
    `prepare` is called before the group is made. With `ends` a process ends once it has answered,
    and closes its connections; else it waits for the others, which may still be making theirs.

    Raises:
        ProcessFailed: a process raised something, died, or took longer than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        pipes, processes = [], []
        for rank in range(workers):
            receiving, sending = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_process,
                daemon=True,
                args=(
                    sending,
                    rendezvous,
                    rank,
                    workers,
                    function,
                    arguments,
                    backend,
                    prepare,
                    ends,
                ),
            )
            process.start()
            sending.close()
            pipes.append(receiving)
            processes.append(process)
        try:
            return [_result(pipe, rank, timeout) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _result(pipe, rank: int, timeout: float):
    if not pipe.poll(timeout):
        raise ProcessFailed(f"rank {rank} took longer than {timeout} seconds")
    try:
        succeeded, result = pipe.recv()
    except EOFError as error:
        raise ProcessFailed(f"rank {rank} ended without a result") from error
    if not succeeded:
        raise ProcessFailed(f"rank {rank}: {result}")
    return torch.load(io.BytesIO(result), weights_only=False)


def _process(
    pipe,
    rendezvous: str,
    rank: int,
    workers: int,
    function: Callable,
    arguments: tuple,
    backend: str,
    prepare: Callable[[], None] | None,
    ends: bool,
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    try:
        if prepare is not None:
            prepare()
        distributed.init_process_group(
            backend,
            init_method=rendezvous,
            rank=rank,
            world_size=workers,
            timeout=datetime.timedelta(seconds=60),
        )
        result = io.BytesIO()
        torch.save(function(rank, *arguments), result)
        pipe.send((True, result.getvalue()))
        if not ends:
            multiprocessing.parent_process().join()  # until run() kills this process
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
