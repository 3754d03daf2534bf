"""Layers beside the graphs of torch.compile, and what else looks into a module refused in words
that help."""

import functools
from collections.abc import Callable

import torch
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace

REASON = (
    "a layer of lsq is a program of fused operations already and runs beside the compiled graph; "
    "compile without fullgraph=True"
)
_MODES = torch._C._TorchDispatchModeKey


def looking_in() -> str | None:
    """Name a transform of PyTorch that is active and cannot look into programs; None: none."""
    if torch._C._are_functorch_transforms_active():
        return "torch.func"
    if torch._C._get_tracing_state():
        return "torch.jit.trace"
    if torch.compiler.is_exporting():
        return "torch.export"
    if _symbolic_trace._is_fx_tracing_flag or torch._C._get_dispatch_mode(_MODES.PROXY):
        return "torch.fx"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    return "FakeTensorMode" if torch._C._get_dispatch_mode(_MODES.FAKE) else None


def beside_the_graph(method: Callable) -> Callable:
    """Decorate a method that runs a program: torch.compile breaks its graph there and calls the
    method as it is.

    This is `torch.compiler.disable` as PyTorch itself uses it, which imports torch._dynamo at the
    first call and not
    here: that takes as long as importing PyTorch, and who only reads an exported model calls no
    layer. The method raises RuntimeError where somebody is `looking_in`.
    """

    @functools.wraps(method)
    def checked(*arguments, **options):
        looker = looking_in()
        if looker is not None:
            raise RuntimeError(refusal(looker))
        return method(*arguments, **options)

    beside = torch._disable_dynamo(checked)
    # what a user is told of the break
    beside._torchdynamo_disable, beside._torchdynamo_disable_msg = (True, REASON)
    return beside


def refusal(name: str) -> str:
    """Return the error message for a user of `name`."""
    return (
        f"{name} cannot look into layers of lsq, which run as whole programs: lsq.revert(model)"
        " makes plain PyTorch of "
        "a converted model, and skip= of lsq.convert leaves layers as they are"
    )
