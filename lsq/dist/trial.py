"""What the mode `auto` chooses: each mode exchanges the same bucket once the training begins.

A trial counts both the link and the processors that round, add and copy. It does not know how much
of an exchange the backward pass will hide.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lsq.dist.agreement import least_of_all

VALUES = 2**18
"""Of the bucket: 1 MiB of float32."""
ROUNDS = 3
"""The first makes connections; the fastest counts."""
WORTH = 0.8
"""A mode must take less than this share of the time of a more exact one."""


def seconds_of(
    ways: dict[str, Callable[[Tensor], object]],
    group: ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Return the time that the slowest worker of `group` needs for a bucket of `dtype` in each of
    the ways. Every worker calls it, and gets the same."""
    bucket, found = torch.zeros(VALUES, device=device, dtype=dtype), []
    generator = torch.Generator(device)  # the training's own random numbers stay
    for average in ways.values():
        times = []
        for _ in range(ROUNDS):
            bucket.normal_(generator=generator)
            least_of_all(torch.zeros(1, device=device), group).item()  # so that all begin together
            begun = time.perf_counter()
            average(bucket)
            bucket[:1].item()  # a GPU is done
            times.append(time.perf_counter() - begun)
        found.append(-min(times))
    slowest = least_of_all(torch.tensor(found, device=device), group)
    return dict(zip(ways, (-slowest).tolist(), strict=True))


def choose(seconds: dict[str, float]) -> str:
    """Return the mode to take, from times in order of exactness, the most exact first."""
    chosen, *others = seconds
    for mode in others:
        if seconds[mode] < WORTH * seconds[chosen]:
            chosen = mode
    return chosen
