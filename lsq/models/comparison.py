"""A fused layer beside the code of its class, once: both in floats, on the first tokens that come.

It draws no random numbers, nothing that a pass keeps is touched, and modes of PyTorch's functions
do not see it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from lsq.layers.float_fallback import in_floats
from lsq.layers.packing import Packing
from lsq.layers.programs import Mode
from lsq.layers.schedule import recomputing
from lsq.models.batch import causal
from lsq.run import rehearsal
from lsq.run.backends import backend
from lsq.run.executor import Execution

if TYPE_CHECKING:
    from lsq.models.fused_layer import FusedLayer, Others

logger = logging.getLogger(__name__)
TOKENS = 8
ALLOWED = 1e-3, 5e-2
"""Norm of the difference over that of what the layer adds to its input: in float32, in 16 bits."""


def compare(layer: FusedLayer, x: torch.Tensor, others: Others) -> bool:
    """Compare results for the first tokens of x [B, T, H].

    Returns:
        False where another pass can do it better: this one is rehearsed or run again, or has a
        single token or NaN.

    Raises:
        RuntimeError: the results differ.
    """
    tokens, kind = min(x.shape[1], TOKENS), layer.float_class.__name__
    attention = layer.attention_kind
    if attention not in ("eager", "sdpa"):
        logger.info("a %s is not compared with its program: its attention is %s", kind, attention)
        return True
    later = recomputing() or rehearsal.active() is not None
    if later or tokens < 2 or type(x) is not torch.Tensor or x.is_meta:
        return False
    device = x.device.type
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        _evaluating(layer),
        _autocast_alone(device),
    ):
        x, others = x[:1, :tokens].detach(), others.first(tokens, layer.target)
        expected = layer.original(x, _mask(layer, x), others).float()
        found = _in_floats(layer, x, others).view_as(expected)
        norms = [one.norm().item() for one in (found - expected, expected - x, expected)]
    difference, added, whole = norms
    if not torch.isfinite(torch.tensor([difference, added])).all():
        return False
    dtypes = {x.dtype, *(parameter.dtype for parameter in layer.parameters())}
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    half = dtypes != {torch.float32} or torch.get_float32_matmul_precision() != "highest"
    precision = max(torch.finfo(dtype).eps for dtype in dtypes)
    if difference > ALLOWED[half] * added + 4 * precision * whole:
        raise RuntimeError(
            f"the program of a {type(layer).__name__} and the code of {kind} differ by "
            f"{difference / max(added, 1e-30):.2g} of what the layer adds, in floats, on {tokens} "
            "tokens: lsq does not know what this layer computes. lsq.revert(model) gives the model "
            "back; convert it with fused=False, or with check=False if that is right"
        )
    relative = difference / max(added, 1e-30)
    logger.debug("a %s and its program differ by %.2g on %d tokens", kind, relative, tokens)
    return True


def _in_floats(layer: FusedLayer, x: torch.Tensor, others: Others) -> torch.Tensor:
    packing = Packing(shape=tuple(x.shape[:2]), backend=layer.target)
    inputs, sizes = layer.inputs(x, packing, others)
    mode = Mode(training=False, backward=False, backend=backend("reference"))
    program = in_floats(layer.program(packing.sentences, mode, **sizes))
    inputs |= {virtual.name: layer.own_parameter(virtual.name) for virtual in program.parameters}
    key = {"random_key": torch.zeros(1, dtype=torch.int64, device=x.device)}  # which is not used
    return Execution(program, mode.backend)({**key, **inputs})[0]


def _mask(layer: FusedLayer, x: torch.Tensor) -> torch.Tensor | None:
    if not layer.causal:
        return None
    seen = causal(layer.config.window, torch.ones(x.shape[:2], dtype=torch.bool, device=x.device))
    scores = torch.zeros(seen.shape, dtype=x.dtype, device=x.device)
    return scores.masked_fill(~seen, torch.finfo(x.dtype).min)[:, None]


@contextmanager
def _evaluating(layer: nn.Module) -> Iterator[None]:
    """Without dropout. Setting the mode by `eval` would look at weights anew."""
    trains = [module for module in layer.modules() if module.training]
    try:
        for module in trains:
            module.training = False
        yield
    finally:
        for module in trains:
            module.training = True


def _autocast_alone(device: str):
    """torch.autocast as it is, without its cache: that would keep weights without gradients."""
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if enabled else None
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)
