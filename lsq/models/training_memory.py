"""Memory of a training step on codes, counted on the meta device: shapes without values."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lsq.layers.layer_inputs import LayerInputs
from lsq.layers.trained_codes import TrainedCodes
from lsq.models.conversion import convert
from lsq.models.recomputation import checkpoint_layers
from lsq.models.trained_codes import train_codes
from lsq.optim import moments

KINDS = ("codes", "remainders", "moments", "other weights", "layer inputs", "forward", "backward")
"""Kinds of memory. `forward` and `backward`: made by these passes. Moments are of 8 bits; those of
other weights count as theirs."""
OFFLOADED = ("remainders", "moments", "layer inputs")


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train: with remainders or without, with layers that are computed again, offload."""

    remainder: bool
    again: bool
    offload: bool = False

    def __str__(self) -> str:
        words = ["codes and remainders" if self.remainder else "codes"]
        words += ["layers computed again"] * self.again + ["offload"] * self.offload
        return ", ".join(words)


WAYS = (
    Way(remainder=True, again=False),
    Way(remainder=True, again=True),
    Way(remainder=False, again=False),
    Way(remainder=False, again=True),
    Way(remainder=True, again=True, offload=True),
    Way(remainder=False, again=True, offload=True),
)
"""From the one that changes least to the one that needs least."""


@dataclass(kw_only=True)
class TrainingMemory:
    """What a step needs. `steps`: bytes by kind after each allocation that raises them."""

    way: Way
    parameters: int
    steps: list[dict[str, int]] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """The most bytes."""
        return max(sum(one.values()) for one in self.steps)

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by kind where all are most."""
        return max(self.steps, key=lambda one: sum(one.values()))


def training_memory(
    make: Callable[[], nn.Module], step: Callable[[nn.Module], Tensor], way: Way
) -> TrainingMemory:
    """Count the memory of a training step with 8-bit moments, inside the backward pass.

    Args:
        make: returns a float model of transformers on the meta device.
        step: runs a model on a batch on the meta device, and returns the loss.
        way: how it trains.
    """
    model = make().train()
    convert(model, check=False)
    with torch.device("meta"):
        train_codes(model, remainder=way.remainder)
    recorder = _Recorder()
    largest = 0
    for kind, tensor in _lasting(model):
        if way.offload and kind in OFFLOADED:
            largest = max(largest, tensor.nbytes)
            continue
        recorder.add(tensor, kind)
    # a matrix's moments and remainder, and those of the next one, which are prefetched
    recorder.now["moments"] += 2 * (3 if way.remainder else 2) * largest
    if way.again:
        model.train()
        checkpoint_layers(model)
        inputs = _Inputs(recorder, counted=not way.offload)
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = inputs.checkpoint
    hooks = [
        one.register_post_accumulate_grad_hook(_consume)
        for one in model.parameters()
        if isinstance(one, TrainedCodes)
    ]
    with recorder:
        loss = step(model)
        recorder.kind = "backward"
        loss.backward()
    for hook in hooks:
        hook.remove()
    count = sum(one.numel() for one in model.parameters())
    return TrainingMemory(way=way, parameters=count, steps=recorder.steps)


def _consume(parameter: Tensor) -> None:
    parameter.grad = None  # as a step inside the backward pass does


def _lasting(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (kind, tensor) of what lives as long as the training."""
    seen = set()
    for parameter in model.parameters():
        if not isinstance(parameter, TrainedCodes):
            yield "other weights", parameter.detach()
            if parameter.requires_grad:
                yield from (("other weights", torch.empty_like(parameter)) for _ in range(2))
            continue
        if id(parameter.codes) not in seen:
            seen.add(id(parameter.codes))
            stored, remainder, scale = parameter.codes.tensors
            yield from (("codes", stored), ("codes", scale))
            if remainder is not None:
                yield "remainders", remainder
        yield from (("moments", one) for one in moments.zeros(parameter, 8).values())
    yield from (("other weights", one) for one in model.buffers())


class _Recorder(TorchDispatchMode):
    """Counts the storages of the meta device that are alive, by the kind that is current when
    they are made."""

    def __init__(self):
        super().__init__()
        self.kind = "forward"
        self.now = Counter()
        self.steps: list[dict[str, int]] = []
        self._alive: dict[int, tuple[str, int]] = {}
        self._held: list[Tensor] = []

    def add(self, tensor: Tensor, kind: str) -> None:
        """Count a tensor that stays."""
        self._held.append(tensor)
        self._count(tensor, kind)

    def _count(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = kind, storage.nbytes()
        self.now[kind] += storage.nbytes()
        weakref.finalize(storage, self._gone, key).atexit = False
        self.steps.append(dict(self.now))

    def _gone(self, key: int) -> None:
        kind, size = self._alive.pop(key)
        self.now[kind] -= size

    def __torch_dispatch__(self, function, types, arguments=(), options=None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and arguments[0].is_meta:
            # models ask whether masks are trivial; here they are
            return arguments[0].dtype.is_floating_point and 1.0 or True
        found = function(*arguments, **(options or {}))
        for tensor in tree_leaves(found):
            if type(tensor) is Tensor and tensor.is_meta:
                self._count(tensor, self.kind)
        return found


class _Inputs(LayerInputs):
    """Inputs of layers that are counted as such, or not at all."""

    def __init__(self, recorder: _Recorder, *, counted: bool):
        super().__init__()
        self._recorder, self._counted = recorder, counted

    def _memory(self, size: int, device: torch.device) -> tuple[None, Tensor]:
        before = self._recorder.kind
        self._recorder.kind = "layer inputs" if self._counted else "elsewhere"
        try:
            return super()._memory(size, device)
        finally:
            self._recorder.kind = before
