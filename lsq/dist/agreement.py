"""Decisions that all processes of a training must take alike."""

import torch
from torch import distributed


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether `flag` is set in any process; every process must call it. `device` is the one that trains."""
    if not distributed.is_available() or not distributed.is_initialized():
        return flag
    votes = torch.tensor(int(flag), device=device)
    distributed.all_reduce(votes, op=distributed.ReduceOp.MAX)
    return bool(votes)
