"""Memory where the gradients of parameters belong, such as DDP's buckets: backward passes write
them there at once.

Autograd makes the first gradient of a step a parameter's `grad` as it is. Where that lies in its
bucket already, DDP has nothing to copy. A home is given out once for each exchange, and only while
there is no `grad`, to which further gradients are added.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lsq.native.addresses import ALIGNMENT
from lsq.program.program import Program
from lsq.program.tensor import VirtualTensor


class Home:
    """That of one parameter.

    Args:
        parameter: whose.
        view: of its shape.
    """

    def __init__(self, parameter: Tensor, view: Tensor):
        self._parameter = weakref.ref(parameter)
        self._view = view
        self._usable = view.is_contiguous() and (
            view.device.type == "cpu" or view.data_ptr() % ALIGNMENT == 0
        )
        self.free = True
        """Whether nothing is there that is still wanted, apart from `grad`."""
        _homes[id(parameter)] = self

    def fits(self, parameter: Tensor, gradient: VirtualTensor) -> bool:
        """Whether a gradient of `parameter` can be written there now."""
        same = (
            self._parameter() is parameter
            and self._usable
            and self._view.shape == tuple(gradient.shape)
        )
        return same and self.free and parameter.grad is None and self._view.dtype == gradient.dtype

    def take(self) -> Tensor:
        """A new tensor there, which is nowhere else held: autograd would clone it."""
        self.free = False
        return self._view.detach()


_homes: weakref.WeakValueDictionary[int, Home] = weakref.WeakValueDictionary()
"""By the ids of parameters."""


class Bucket:
    """The homes in a bucket, which may take other memory or other parameters."""

    def __init__(self):
        self._storage: torch.UntypedStorage | None = None
        self._homes: list[Home] = []

    def exchanged(self, buffer: Tensor, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """All gradients are in the bucket: the next backward pass may write there.

        Args:
            buffer: the bucket's memory.
            pairs: (parameter, view of its gradient), looked at where `buffer` is new.
        """
        storage = buffer.untyped_storage()
        if self._storage is None or storage._cdata != self._storage._cdata:
            self._storage, self._homes = storage, [Home(*pair) for pair in pairs]
        for home in self._homes:
            home.free = True


def claim(program: Program, functions: Sequence[tuple]) -> Mapping[VirtualTensor, Tensor]:
    """The homes that gradients of `program` go to in the backward pass that runs now.

    Args:
        program: its inputs and parameters are those of a node of autograd.
        functions: `next_functions` of the node.
    """
    if not _homes:
        return {}
    gradients = dict(zip(program.differentiable, program.gradients, strict=True))
    found = {}
    for border, (function, _) in zip(
        (*program.inputs, *program.parameters), functions, strict=True
    ):
        parameter, gradient = getattr(function, "variable", None), gradients.get(border)
        home = None if parameter is None or gradient is None else _homes.get(id(parameter))
        if home is not None and home.fits(parameter, gradient) and _accumulates(function):
            found[gradient] = home.take()
    return found


def _accumulates(function) -> bool:
    """Whether a gradient becomes `grad` in this backward pass: under torch.autograd.grad it is its
    caller's."""
    try:
        return torch._C._will_engine_execute_node(function)
    except RuntimeError:  # so it says of leaves under torch.autograd.grad
        return False
