"""Layers beside the graphs of torch.compile, and what else looks into a module refused in words
that help."""

import functools
from collections.abc import Callable, Mapping

import torch
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace

REASON = (
    "a layer of lsq is a program of fused operations already and runs beside the compiled graph; "
    "compile without fullgraph=True"
)
_MODES = torch._C._TorchDispatchModeKey
LOOKING_IN: Mapping[str, Callable[[], object]] = {
    "torch.func": torch._C._are_functorch_transforms_active,
    "torch.jit.trace": torch._C._get_tracing_state,
    "torch.export": torch.compiler.is_exporting,
    "torch.fx": lambda: (
        _symbolic_trace._is_fx_tracing_flag or torch._C._get_dispatch_mode(_MODES.PROXY)
    ),
    "forward-mode differentiation": lambda: forward_ad._current_level >= 0,
    "FakeTensorMode": lambda: torch._C._get_dispatch_mode(_MODES.FAKE),
}
"""What asks each function of PyTorch what it does -> whether it is at work; programs have none that
it knows."""


def beside_the_graph(method: Callable) -> Callable:
    """Decorate a method that runs a program: torch.compile breaks its graph there and calls the
    method as it is.

    This is `torch.compiler.disable` as PyTorch itself uses it, which imports torch._dynamo at the
    first call and not
    here: that takes as long as importing PyTorch, and who only reads an exported model calls no
    layer. The method raises RuntimeError where something of LOOKING_IN is at work.
    """

    @functools.wraps(method)
    def checked(*arguments, **options):
        for name, active in LOOKING_IN.items():
            if active():
                raise RuntimeError(refusal(name))
        return method(*arguments, **options)

    beside = torch._disable_dynamo(checked)
    # what a user is told of the break
    beside._torchdynamo_disable, beside._torchdynamo_disable_msg = (
        True,
        REASON,
    )
    return beside


def refusal(name: str) -> str:
    """What a user of `name` is told."""
    return (
        f"{name} cannot look into layers of lsq, which run as whole programs: lsq.revert(model)"
        " makes plain PyTorch of "
        "a converted model, and skip= of lsq.convert leaves layers as they are"
    )
