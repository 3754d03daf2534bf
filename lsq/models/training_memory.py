"""Memory of a training step on codes, counted on the meta device: shapes without values.

The step runs as on the CPU: its tensors come from PyTorch's allocator, or from the pool and the
workspaces of lsq.memory.kept, which keep the most that they have given.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lsq.layers.layer_inputs import LayerInputs
from lsq.layers.module import ProgramModule
from lsq.layers.trained_codes import TrainedCodes
from lsq.memory.kept import HUGE_PAGE, SMALLEST, Gaps
from lsq.models.conversion import convert
from lsq.models.recomputation import run_again
from lsq.models.trained_codes import train_codes
from lsq.optim import moments
from lsq.program.program import Program
from lsq.run.frames import FreshPasses

OFFLOADED = ("remainders", "moments", "layer inputs")
KINDS = ("codes", "remainders", "moments", "other weights", "layer inputs", "forward", "backward")
"""Kinds of memory. "forward" and "backward": made by these passes, and not freed yet. Moments have
8 bits; those of other weights, as norms, count as such weights."""
REUSED = "kept for reuse"
"""Free memory of the pool, and the largest workspace."""
AFTER_CALIBRATION = 1 << 20
"""Passes after which nothing is measured any more."""


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


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """What training needs; `timeline`: bytes by kind after each allocation."""

    way: Way
    parameters: int
    timeline: Sequence[dict[str, int]]

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by kind where all are most."""
        return max(self.timeline, key=lambda one: sum(one.values()))

    @property
    def peak(self) -> int:
        """The most bytes."""
        return sum(self.at_peak.values())


def training_memory(
    make: Callable[[], nn.Module], step: Callable[[nn.Module], Tensor], way: Way
) -> TrainingMemory:
    """Count the memory of training with 8-bit moments and steps inside the backward pass: passes
    that measure clips, and a later one.

    Args:
        make: returns a float model of transformers on the meta device.
        step: runs a model on a batch on the meta device, and returns the loss.
        way: how it trains.
    """
    model = make()
    convert(model, check=False)
    with torch.device("meta"):
        train_codes(model, remainder=way.remainder)
    recorder = _Recorder()
    _count_lasting(model, way, recorder)
    model.train()
    if way.again:
        run_again(model, _Inputs(recorder, counted=not way.offload))
    layers = [one for one in model.modules() if isinstance(one, ProgramModule)]
    for layer in layers:
        layer._watcher = recorder.saw
    for parameter in model.parameters():
        if isinstance(parameter, TrainedCodes):
            parameter.register_post_accumulate_grad_hook(_consume)
    passes = Context()  # in which no packing of an earlier batch is remembered
    with recorder:
        for _ in range(2):  # clips are measured in another way once there is one
            passes.run(_pass, model, step, recorder)
        for layer in layers:
            layer.schedule.passes = AFTER_CALIBRATION
        passes.run(_pass, model, step, recorder)
    count = sum(one.numel() for one in model.parameters())
    return TrainingMemory(way=way, parameters=count, timeline=recorder.timeline)


def _pass(model: nn.Module, step: Callable[[nn.Module], Tensor], recorder: "_Recorder") -> None:
    recorder.kind = "forward"
    loss = step(model)
    recorder.kind = "backward"
    loss.backward()
    model.zero_grad()


def _consume(parameter: Tensor) -> None:
    parameter.grad = None  # as a step inside the backward pass does


def _count_lasting(model: nn.Module, way: Way, recorder: "_Recorder") -> None:
    """Count what lives as long as the training."""
    largest = 0
    for kind, tensor in _lasting(model):
        if way.offload and kind in OFFLOADED:
            largest = max(largest, tensor.nbytes)
        else:
            recorder.add(tensor, kind)
    # of the matrix that steps and of the next one, which is prefetched
    recorder.now["moments"] += 2 * (3 if way.remainder else 2) * largest


def _lasting(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
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
    """Follows the storages of the meta device that are alive, by the kind that is current when
    they are made."""

    def __init__(self):
        super().__init__()
        self.kind: str | None = None
        """None counts nothing."""
        self.now: Counter[str] = Counter()
        self.timeline: list[dict[str, int]] = []
        self._alive: dict[int, tuple[str, int, int | None]] = {}
        """Storage -> kind, bytes, offset in the pool."""
        self._held: list[Tensor] = []
        self._gaps, self._pool, self._pool_most, self._workspace = Gaps(1 << 50), 0, 0, 0

    def add(self, tensor: Tensor, kind: str) -> None:
        """Count a tensor that stays."""
        self._held.append(tensor)
        self._count(tensor, kind, pooled=False)

    def saw(self, module: nn.Module, program: Program, *_) -> None:
        """Note the workspaces of a program that has run."""
        prepared = [one for one in program.prepared.values() if isinstance(one, FreshPasses)]
        self._workspace = max([self._workspace, *(one.workspace_bytes for one in prepared)])

    def _count(self, tensor: Tensor, kind: str, *, pooled: bool) -> None:
        storage = tensor.untyped_storage()
        key, size, offset = storage._cdata, storage.nbytes(), None
        if key in self._alive:
            return
        if pooled and size >= SMALLEST:
            offset = self._gaps.take(size)
            self._pool += size
            self._pool_most = max(self._pool_most, offset + size)
        self._alive[key] = kind, size, offset
        self.now[kind] += size
        weakref.finalize(storage, self._gone, key).atexit = False
        self._note()

    def _gone(self, key: int) -> None:
        kind, size, offset = self._alive.pop(key)
        self.now[kind] -= size
        if offset is not None:
            self._gaps.give_back(offset, size)
            self._pool -= size

    def _note(self) -> None:
        if self.kind is None:
            return
        reused = _pages(self._pool_most) - self._pool + _pages(self._workspace)
        self.timeline.append({**self.now, REUSED: reused})

    def __torch_dispatch__(self, function, types, arguments=(), options=None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and arguments[0].is_meta:
            # models ask whether masks are trivial; here they are
            return 1.0 if arguments[0].dtype.is_floating_point else True
        found = function(*arguments, **(options or {}))
        if function is not torch.ops.aten.set_.source_Storage_storage_offset and self.kind:
            pooled = function is torch.ops.aten.empty.memory_format
            for tensor in tree_leaves(found):
                if type(tensor) is Tensor and tensor.is_meta:
                    self._count(tensor, self.kind, pooled=pooled)
        return found


def _pages(size: int) -> int:
    return -(-size // HUGE_PAGE) * HUGE_PAGE


class _Inputs(LayerInputs):
    """Inputs of layers that are counted as such, or not at all."""

    def __init__(self, recorder: _Recorder, *, counted: bool):
        super().__init__()
        self._recorder, self._kind = recorder, "layer inputs" if counted else None

    def _memory(self, size: int, device: torch.device) -> tuple[None, Tensor]:
        before, self._recorder.kind = self._recorder.kind, self._kind
        try:
            return super()._memory(size, device)
        finally:
            self._recorder.kind = before
