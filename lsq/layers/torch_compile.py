"""Layers beside the graphs of torch.compile."""

from collections.abc import Callable

import torch

REASON = (
    "a layer of lsq is a program of fused operations already and runs beside the compiled graph; "
    "compile without fullgraph=True"
)


def beside_the_graph(method: Callable) -> Callable:
    """Decorate a method that runs a program: torch.compile breaks its graph there and calls the method as it is.

    This is `torch.compiler.disable` as PyTorch itself uses it, which imports torch._dynamo at the first call and not
    here: that takes as long as importing PyTorch, and who only reads an exported model calls no layer.
    """
    beside = torch._disable_dynamo(method)
    beside._torchdynamo_disable, beside._torchdynamo_disable_msg = True, REASON  # what a user is told of the break
    return beside
