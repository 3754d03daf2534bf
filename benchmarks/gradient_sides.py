"""Ways to average gradients that benchmarks compare, by the names that they have in the results."""

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lsq.dist import GradientConfig, compress_gradients

EXACT = "exact"
"""DistributedDataParallel without a hook: an all-reduce in float32."""
DISTURBED = "exact, disturbed"
"""The same, with every averaged value off by about a millionth: what a training makes of the
smallest differences."""
DISTURBANCE = 1e-6

LSQ_SIDES = {
    "bf16": {"mode": "bf16"},
    "fp16": {"mode": "fp16"},
    "gcq": {"mode": "gcq"},
    "int8": {"mode": "int8"},
    "int8_hier": {"mode": "int8_hier"},
}
"""Name -> options of GradientConfig. bf16 and fp16 are PyTorch's own hooks."""

SIDES = (EXACT, DISTURBED, *LSQ_SIDES)


def attach(model: DistributedDataParallel, side: str, node_size: int):
    """Make `model` average its gradients in the way of `side`; every process calls it.

    Args:
        node_size: processes that count as one node, for the hierarchical modes.

    Returns:
        lsq's GradientCompression, None for the other sides.

    Raises:
        ValueError: there is no such side.
    """
    if side == EXACT:
        return None
    if side == DISTURBED:
        model.register_comm_hook(torch.Generator().manual_seed(1), disturbed_hook)
    elif side in LSQ_SIDES:
        return compress_gradients(model, GradientConfig(**LSQ_SIDES[side], node_size=node_size))
    else:
        raise ValueError(f"{side!r} is not one of {', '.join(map(repr, SIDES))}")
    return None


def disturbed_hook(
    generator: torch.Generator, bucket: distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean, times 1 + noise of size `DISTURBANCE`, the same on every process."""
    factor = 1 + DISTURBANCE * torch.randn(bucket.buffer().shape, generator=generator)
    future = default_hooks.allreduce_hook(distributed.group.WORLD, bucket)
    return future.then(lambda averaged: averaged.value().mul_(factor))
