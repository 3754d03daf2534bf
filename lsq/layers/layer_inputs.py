"""Inputs of layers that the backward pass computes again, kept as int8 codes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lsq.memory.scratch import Scratch
from lsq.ops.gradient_messages import MessageLayout, Messages, PackGradients, UnpackGradients
from lsq.run.backends import for_device
from lsq.run.executor import FLOATS
from lsq.run.frames import fresh


@dataclass(eq=False, kw_only=True)
class KeptInput:
    """An input as codes in blocks of 128 with a scale: 1.016 bytes a value."""

    shape: torch.Size
    dtype: torch.dtype
    messages: Messages
    scratch: Scratch | None
    before: weakref.ref | None
    """The input that was kept before, which the backward pass needs next."""

    def restore(self) -> Tensor:
        device = self.messages.data.device
        values = fresh(self.shape, self.dtype, device)
        for_device(device).run(UnpackGradients(messages=self.messages, x=values.view(-1)))
        return values

    def prefetch(self) -> None:
        if self.scratch is not None:
            self.scratch.prefetch(0, self.scratch.end)


class LayerInputs:
    """Runs layers without keeping more than their inputs; `folder`: of files that hold these."""

    def __init__(self, folder: str | os.PathLike | None = None):
        if folder is not None:
            Scratch(folder, 1)  # an unusable folder is an error now, and not in the first pass
        self._folder = folder
        self._free: dict[int, list[tuple[Scratch, Tensor]]] = {}
        self._last: weakref.ref | None = None

    def __reduce__(self):
        return LayerInputs, (self._folder,)  # a copy has files of its own

    def checkpoint(self, function: Callable, first: object, *others, **options):
        """Run a layer as torch.utils.checkpoint.checkpoint(use_reentrant=False) does, which takes
        the same arguments. The first argument is kept as codes, if it is floats of 32 bits or fewer
        that require a gradient; the backward pass reads it rounded. Other arguments are kept as
        they are."""
        rounds = isinstance(first, Tensor) and first.requires_grad and first.dtype in FLOATS
        if not rounds or not first.numel():
            return checkpoint(function, first, *others, use_reentrant=False, **options)

        def layer(x: Tensor, **named):
            return function(x, *others, **named)

        with torch.autograd.graph.saved_tensors_hooks(self._keep, self._restore):
            return checkpoint(layer, first, use_reentrant=False, **options)

    def _keep(self, tensor: Tensor) -> KeptInput:
        layout = MessageLayout.for_values(tensor.numel(), 1)
        scratch, data = self._memory(layout.message_bytes, tensor.device)
        messages = Messages(layout=layout, data=data[None, None])
        packed = Messages(layout=layout, data=data[None])
        values = tensor.detach().reshape(1, -1)
        for_device(tensor.device).run(PackGradients(x=values, messages=packed))
        made = KeptInput(
            shape=tensor.shape,
            dtype=tensor.dtype,
            messages=messages,
            scratch=scratch,
            before=self._last,
        )
        if scratch is not None:
            weakref.finalize(made, self._free[len(data)].append, (scratch, data)).atexit = False
        self._last = weakref.ref(made)
        return made

    def _memory(self, size: int, device: torch.device) -> tuple[Scratch | None, Tensor]:
        if self._folder is None or device.type != "cpu":
            return None, fresh([size], torch.uint8, device)
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        scratch = Scratch(self._folder, size)
        return scratch, scratch.tensor([size], torch.uint8)

    @staticmethod
    def _restore(kept: KeptInput) -> Tensor:
        before = kept.before and kept.before()
        if before is not None:
            before.prefetch()
        return kept.restore()
