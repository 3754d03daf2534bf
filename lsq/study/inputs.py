"""Inputs of a model's matrix products while it runs: seen, and changed.

Shapes: N outputs, K inputs.

Products are torch.nn.functional.linear, by which linear layers, PyTorch's and fairseq's attention
multiply, and torch.addmm, by which GPT-2's layers in transformers do. Those of lsq's own layers are
operations of programs and none of these.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

Look = Callable[[str, Tensor, bool], Tensor]
"""Of the name of a weight, an input float [..., K] of it, and whether the weight lies as [K, N] and
not as [N, K]: what the product is to read in place of the input.
"""


@contextlib.contextmanager
def products(weights: Mapping[str, Tensor], look: Look) -> Iterator[None]:
    """Within this context every product with one of `weights`, or with a part of one, reads what
    `look` returns.

    It changes PyTorch's functions for the whole process, so one thread at a time may be within.
    PyTorch's fused attention and encoder layers, which show no products, are off meanwhile.
    """
    bounds = {
        name: (weight.data_ptr(), weight.data_ptr() + weight.numel() * weight.element_size())
        for name, weight in weights.items()
    }

    def seen(weight: Tensor, x: Tensor, inner: int) -> Tensor:
        place = weight.data_ptr()
        name = next((name for name, (first, end) in bounds.items() if first <= place < end), None)
        return x if name is None else look(name, x, weight.stride(inner) != 1)

    def of_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(seen(weight, input, -1), weight, bias)

    def of_addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **options) -> Tensor:
        return addmm(input, seen(mat2, mat1, 0), mat2, **options)

    linear, addmm, fused = functional.linear, torch.addmm, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    functional.linear, torch.addmm = of_linear, of_addmm
    try:
        yield
    finally:
        functional.linear, torch.addmm = linear, addmm
        torch.backends.mha.set_fastpath_enabled(fused)
