"""Decisions and configurations that must be the same in all processes of a training."""

import contextlib
import json
from collections.abc import Mapping

import torch
from torch import distributed
from torch.distributed import ProcessGroup


def any_process(flag: bool, device: torch.device) -> bool:
    """Return whether `flag` is set in any process. Each calls it, with the device on which it
    trains."""
    if not distributed.is_available() or not distributed.is_initialized():
        return flag
    votes = torch.tensor(int(flag), device=device)
    distributed.all_reduce(votes, op=distributed.ReduceOp.MAX)
    return bool(votes)


def least_of_all(values: torch.Tensor, group: ProcessGroup | None = None) -> torch.Tensor:
    """Return the elementwise minimum of `values` [...] over the processes of `group` (None: all).
    Every process must call it. `values` must be on the device that trains."""
    if distributed.is_available() and distributed.is_initialized():
        values = values.clone()
        distributed.all_reduce(values, op=distributed.ReduceOp.MIN, group=group)
    return values


def gather_text(text: str, group: ProcessGroup, device: torch.device) -> list[str]:
    """Return the texts of all processes of a group, in order of ranks. Every process calls it."""
    texts = [""] * group.size()
    at = (
        contextlib.nullcontext()
        if device.type == "cpu"
        else torch.accelerator.device_index(device.index)
    )
    with at:  # NCCL sends from the current device
        distributed.all_gather_object(texts, text, group=group)
    return texts


def require_same(
    what: str, settings: Mapping[str, object], group: ProcessGroup, device: torch.device
) -> None:
    """Check that `settings` (JSON values) are the same in every process of a group. Every process
    must call it. Raises ValueError: they differ; the message names the first rank that differs from
    rank 0, and the values of both."""
    texts = gather_text(json.dumps(dict(settings), sort_keys=True), group, device)
    for rank, text in enumerate(texts):
        if text != texts[0]:
            first, other = json.loads(texts[0]), json.loads(text)
            names = sorted(name for name in {*first, *other} if first.get(name) != other.get(name))
            here, there = (
                ", ".join(f"{name}={values.get(name)!r}" for name in names)
                for values in (first, other)
            )
            raise ValueError(
                f"{what} must be the same in every process, but rank 0 has {here} and rank {rank}"
                f" has {there}; start all processes with the same options"
            )
