"""Comparison of a fused layer with the code of its class: once, in floats, on a few tokens.

It changes no state of the model, nor of random generators.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lsq.layers.in_place import InPlace
from lsq.layers.linear import autocasts
from lsq.layers.schedule import recomputing
from lsq.run.frames import active_rehearsal

logger = logging.getLogger(__name__)
TOKENS = 8
ALLOWED = 1e-3, 5e-2
"""Largest norm of a difference over the norm of what the layer adds: in float32, in 16 bits."""


def compare(
    layer: InPlace,
    x: torch.Tensor,
    attention: str,
    original: Callable[[torch.Tensor], torch.Tensor],
    program: Callable[[torch.Tensor], torch.Tensor],
) -> bool:
    """Compare results for the first tokens of x [B, T, H], the input of a fused layer.

    `attention`: its implementation in the code of the class. `original`, `program`: compute tokens
    [1, t, H] by that code, and by the program in floats. Returns False if this pass cannot tell: it
    is rehearsed or run again, has a single token, or gives NaN. Raises RuntimeError if results
    differ.
    """
    tokens, kind = min(x.shape[1], TOKENS), layer.float_class.__name__
    if attention not in ("eager", "sdpa"):
        logger.info("a %s is not compared with its program: its attention is %s", kind, attention)
        return True
    later = recomputing() or active_rehearsal.get() is not None
    if later or tokens < 2 or type(x) is not torch.Tensor or x.is_meta:
        return False
    device = x.device.type
    casts = autocasts(device)
    dtype = torch.get_autocast_dtype(device) if casts else None
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        _evaluating(layer),
        # a cache of autocast would keep weights without gradients
        torch.autocast(device, dtype=dtype, enabled=casts, cache_enabled=False),
    ):
        x = x[:1, :tokens].detach()
        expected = original(x).float()
        result = program(x).view_as(expected)
        norms = [one.norm().item() for one in (result - expected, expected - x, expected)]
    difference, added, whole = norms
    if not torch.isfinite(torch.tensor([difference, added])).all():
        return False
    dtypes = {x.dtype, *(parameter.dtype for parameter in layer.parameters())}
    dtypes |= {dtype} if casts else set()
    half = dtypes != {torch.float32} or torch.get_float32_matmul_precision() != "highest"
    precision = max(torch.finfo(dtype).eps for dtype in dtypes)
    relative = difference / max(added, 1e-30)
    if difference > ALLOWED[half] * added + 4 * precision * whole:
        raise RuntimeError(
            f"the program of a {type(layer).__name__} and the code of {kind} differ by"
            f" {relative:.2g} of what the layer adds, in floats, on {tokens} tokens: lsq does not"
            " know what this layer computes. lsq.revert(model) gives the model back; convert it"
            " with fused=False, or with check=False if that is right"
        )
    logger.debug("a %s and its program differ by %.2g on %d tokens", kind, relative, tokens)
    return True


@contextmanager
def _evaluating(layer: nn.Module) -> Iterator[None]:
    trains = [module for module in layer.modules() if module.training]
    try:
        for module in trains:
            module.training = False
        yield
    finally:
        for module in trains:
            module.training = True
