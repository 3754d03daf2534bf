"""Memory where the gradients of parameters belong, such as DDP's buckets: backward passes write
them there at once.

Autograd makes the first gradient of a step a parameter's `grad` as it is. Where that lies in its
bucket already, DDP has nothing to copy. A view is given out once for each exchange, and only while
there is no `grad`, to which further gradients are added.
"""

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lsq.native.addresses import ALIGNMENT
from lsq.program.tensor import VirtualTensor
from lsq.run.parameter_state import known_state, state_of


class BucketView:
    """The view of one parameter.

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
        state_of(parameter).bucket_view = weakref.ref(self)

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


class Bucket:
    """The views in a bucket, which may take other memory or other parameters."""

    def __init__(self):
        self._storage: torch.UntypedStorage | None = None
        self._views: list[BucketView] = []

    def exchanged(self, buffer: Tensor, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """All gradients are in the bucket: the next backward pass may write there.

        Args:
            buffer: the bucket's memory.
            pairs: (parameter, view of its gradient), looked at where `buffer` is new.
        """
        storage = buffer.untyped_storage()
        if self._storage is None or storage._cdata != self._storage._cdata:
            self._storage, self._views = storage, [BucketView(*pair) for pair in pairs]
        for view in self._views:
            view.free = True


def claim(
    gradients: Sequence[VirtualTensor | None], functions: Sequence[tuple]
) -> dict[VirtualTensor, Tensor]:
    """The views that gradients go to in the backward pass that runs now.

    Args:
        gradients: those of a node of autograd, one for each tensor that it was applied to.
        functions: `next_functions` of the node.
    """
    found = {}
    for gradient, (function, _) in zip(gradients, functions, strict=True):
        parameter = getattr(function, "variable", None)
        view = None if parameter is None or gradient is None else _view_of(parameter)
        if view is not None and view.fits(parameter, gradient) and _accumulates(function):
            found[gradient] = view.take()
    return found


def _view_of(parameter: Tensor) -> BucketView | None:
    state = known_state(parameter)
    return state and state.bucket_view and state.bucket_view()


def _accumulates(function) -> bool:
    """Whether a gradient becomes `grad` in this backward pass: under torch.autograd.grad it is its
    caller's."""
    try:
        return torch._C._will_engine_execute_node(function)
    except RuntimeError:  # so it says of leaves under torch.autograd.grad
        return False
