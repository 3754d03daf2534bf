"""State of parameters that modules and optimizers share: codes of weights, limits of clips.

A module notes here where the codes of a weight lie and how far a clip may step. lsq.optim.Adam
writes the codes and keeps the limits in its step. Before another optimizer steps, a hook
invalidates the codes and saves the clips. A state is stored beside its parameter, not on it, so
that a copy of the parameter has none.
"""

from __future__ import annotations

import weakref
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lsq.native import loader
from lsq.program.values import Weight
from lsq.run.shards import copies, is_shard, local

SMALL = 2**12
"""Values of the largest tensor that is always compared whole."""
FEW_ROWS = 64
"""A pass of fewer rows compares about SAMPLES values of larger tensors: all would take too long."""
SAMPLES = 61


class Stamp:
    """A record of tensors, to see later whether they still hold the same values.

    PyTorch counts writes to a tensor, but not through `.data`, numpy or another process. So on the
    CPU values are compared, too: by a checksum of all (`exact`) or by samples. Other devices would
    have to wait for that.
    """

    def __init__(self, tensors: Sequence[Tensor], *, exact: bool = True):
        self.exact = exact
        self._counted = [_counted(tensor) for tensor in tensors]
        self._samples = [_sample(tensor).clone() for tensor in tensors]
        self._sums = [checksum(tensor) if exact else None for tensor in tensors]

    def holds(self, tensors: Sequence[Tensor], *, rows: int = 0) -> bool:
        return not self.changed(tensors, rows=rows)

    def changed(self, tensors: Sequence[Tensor], *, rows: int = 0) -> set[int]:
        """Return the indices of tensors whose memory or values have changed. In a pass of fewer
        than FEW_ROWS `rows`, a few changed values of a large tensor may be missed."""
        if len(tensors) != len(self._counted):
            return set(range(max(len(tensors), len(self._counted))))
        moved = {
            number
            for number, tensor in enumerate(tensors)
            if self._counted[number] != _counted(tensor)
        }
        return moved | self._differ(tensors, moved, whole=rows >= FEW_ROWS)

    def _differ(self, tensors: Sequence[Tensor], known: set[int], *, whole: bool) -> set[int]:
        """Return the indices of tensors, but for the known ones, with other values."""
        here = [one for one, tensor in enumerate(tensors) if tensor.is_cpu and one not in known]
        summed = []
        if self.exact:
            summed = [one for one in here if whole or tensors[one].numel() <= SMALL]
        sums = checksums([tensors[one] for one in summed]) if summed else ()
        found = {one for one, sum in zip(summed, sums, strict=True) if sum != self._sums[one]}
        for one in here:
            if one not in summed and not torch.equal(self._samples[one], _sample(tensors[one])):
                found.add(one)
        return found

    def same_values(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether `tensors` hold the values of the first tensors of the record, wherever
        they lie; always True off the CPU."""
        return self._sums[: len(tensors)] == [checksum(tensor) for tensor in tensors]


def checksum(tensor: Tensor) -> int | None:
    """Return a checksum of all values in their order; None off the CPU."""
    if tensor.device.type != "cpu":
        return None
    return checksums([tensor])[0]


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return the checksums of CPU tensors, by one call of the C++ library if it is there."""
    values = [
        one if type(one) is nn.Parameter and one.is_contiguous() else one.detach().contiguous()
        for one in tensors
    ]
    if not loader.available():
        return [zlib.crc32(one.detach().view(-1).view(torch.uint8).numpy()) for one in values]
    given = array("q", [number for one in values for number in (one.data_ptr(), one.nbytes)])
    found = array("q", bytes(8 * len(values)))
    loader.call("lsq_checksums", given.buffer_info()[0], len(values), found.buffer_info()[0])
    return found.tolist()


def _counted(tensor: Tensor) -> tuple:
    """Return a tensor's memory, shape and version counter, which inference tensors lack."""
    version = 0 if tensor.is_inference() else tensor._version
    return weakref.ref(tensor.untyped_storage()), tensor.data_ptr(), version, tensor.shape


def _sample(tensor: Tensor) -> Tensor:
    """Return all values of a small tensor, or some spread over a large one; none off the CPU."""
    values = tensor.detach().flatten()
    if tensor.device.type != "cpu":
        return values[:0]
    return values if len(values) <= SMALL else values[:: len(values) // SAMPLES]


class WeightCodes:
    """The codes of one weight in their own memory, and whether they are valid.

    `owner`: ids of the weight and of its clip. `tensors`: by their names in programs. `fresh`:
    names of the tensors that are valid while `stamp` holds. `stamp`: the weight and the clip that
    the codes were made from; `exact` if a module made them, not an optimizer; None: no codes are
    valid. `rounded`: where an optimizer writes codes, under `clip`. `writers`: what a module has
    prepared, by backend, dtype and layouts.
    """

    def __init__(self, owner: tuple[int, int]):
        self.owner = owner
        self.tensors: dict[str, Tensor] = {}
        self.fresh: set[str] = set()
        self.stamp: Stamp | None = None
        self.rounded: Weight | None = None
        self.rounded_names: frozenset[str] = frozenset()
        self.clip: weakref.ref | None = None
        self.writers: dict[tuple, Callable[[Tensor, Tensor], None]] = {}

    def for_optimizer(self, parameter: Tensor) -> Weight | None:
        """Return where an optimizer writes the codes of the new weight [N, K]; None: it cannot."""
        rounded, clip = self.rounded, self.clip and self.clip()
        if rounded is None or clip is None or rounded.format.packed:
            return None
        if rounded.codes.device != parameter.device:
            return None
        if rounded.codes.shape[1:] != parameter.shape[1:] or len(clip) not in (1, len(parameter)):
            return None  # its size has changed
        return replace(rounded, clip=clip.detach())

    def written(self, parameter: Tensor) -> None:
        """Note that an optimizer has written the codes of `parameter` to all of `rounded`."""
        self.stamp = Stamp([parameter, self.clip()], exact=False)
        self.fresh = set(self.rounded_names)

    def holds(self, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> bool:
        for name, shape, _ in tensors:
            tensor = self.tensors.get(name)
            if tensor is None or tensor.shape != shape:
                return False
        return True

    def current(self, names: Iterable[str], weight: Tensor, clip: Tensor) -> bool:
        """Return whether an optimizer wrote these tensors and neither weight nor clip has changed
        since. Always False for memory that other processes write to."""
        stamp = self.stamp
        if stamp is None or stamp.exact or not self.fresh.issuperset(names):
            return False
        state, of_clip = known_state(weight), known_state(clip)
        if state is None or state.codes is not self:
            return False
        if of_clip is not None and of_clip.before is not None and not of_clip.limited():
            return False  # the module limits the clip's change before the next pass
        shared = weight.device.type == "cpu" and weight.is_shared()
        return not shared and stamp.holds([weight, clip])


@dataclass(eq=False)
class ParameterState:
    finalizer: weakref.finalize | None = None
    codes: WeightCodes | None = None
    limit: float = 0.0
    """Largest relative change of a clip in a step; 0: any."""
    before: Tensor | None = None
    """A clip's values in the last training pass, unless an optimizer limits its steps."""
    optimizer: weakref.ref | None = None
    """The optimizer that limits the steps of a clip."""
    bucket_view: weakref.ref | None = None

    def limited(self) -> bool:
        return self.optimizer is not None and self.optimizer() is not None


def state_of(parameter: Tensor) -> ParameterState:
    states = steps.states
    state = states.get(id(parameter))
    if state is None:
        state = states[id(parameter)] = ParameterState()
        state.finalizer = weakref.finalize(parameter, states.pop, id(parameter))
        state.finalizer.atexit = False
    return state


def known_state(parameter: Tensor) -> ParameterState | None:
    return steps.states.get(id(parameter))


def take(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Note that `optimizer` limits the steps of the clips among `parameters`."""
    for parameter in parameters:
        state_of(parameter).optimizer = weakref.ref(optimizer)


def drop(parameter: Tensor) -> None:
    """Remove a parameter's state and weak references, which torch.utils.swap_tensors refuses."""
    state = steps.states.pop(id(parameter), None)
    if state is not None:
        state.finalizer.detach()


def withdraw(parameter: Tensor) -> None:
    """Discard the codes of a weight: they are no longer needed."""
    state = known_state(parameter)
    if state is not None and state.codes is not None:
        state.codes.stamp = state.codes.clip = None  # optimizers may still hold the codes
        state.codes = None


def forget(clip: Tensor) -> None:
    state = known_state(clip)
    if state is not None:
        state.before = None


def remember(clips: Iterable[Tensor], limit: float) -> None:
    """Note that a training pass reads `clips`; until the next they may change by the share
    `limit`."""
    unlimited = []
    for clip in clips:
        state = state_of(clip)
        state.limit, state.before = limit, None
        if clip.requires_grad and not state.limited():
            unlimited.append((state, clip.data))
    values = copies([value for _, value in unlimited])
    for (state, _), value in zip(unlimited, values, strict=True):
        state.before = value


def limit_steps(clips: Iterable[Tensor], step: float) -> None:
    """Clamp clips to a relative change of `step` since the last pass."""
    limited = []
    for clip in clips:
        state = known_state(clip)
        if state is not None and state.before is not None:
            limited.append((clip.data, state.before))
    if limited:
        values, before = map(list, zip(*limited, strict=True))
        torch._foreach_maximum_(values, torch._foreach_mul(before, 1 - step))
        torch._foreach_minimum_(values, torch._foreach_mul(before, 1 + step))


def limit_shards(clips: Iterable[tuple[Tensor, float]]) -> None:
    """Note the limits of clips that are shards of FSDP2; see MeasuredClips.settle."""
    for clip, limit in clips:
        state_of(clip).limit = limit


class OptimizerSteps:
    """The steps of all optimizers of this process, and the modules that they may train.

    `count`: steps since `watch`. `before`: functions that are called before each step. `wrapped`:
    model -> the last DistributedDataParallel made of it; `wraps` counts them. `states`: id of a
    parameter -> its state, until the parameter is gone (a WeakTensorKeyDictionary takes ten times
    as long). `shared`, `trained`: see lsq.dist.replicas.
    """

    def __init__(self):
        self.count = self.wraps = 0
        self.states: dict[int, ParameterState] = {}
        self.shared: OrderedDict[int, tuple] = OrderedDict()
        self.trained: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        self.before: list[Callable[[Optimizer], None]] = []
        self.wrapped: weakref.WeakKeyDictionary[nn.Module, weakref.ref] = (
            weakref.WeakKeyDictionary()
        )
        self._modules: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._watching = self._limits_shards = False
        self._shards: list[tuple[Tensor, Tensor, float]] = []
        """(own part of a clip, values before the step, limit) if no optimizer limits the step."""

    def know(self, module: nn.Module, before: Callable[[Optimizer], None]) -> None:
        """Note that `module` may be trained; call `before` before each step, once for all
        modules."""
        self._modules.setdefault(module)
        if before not in self.before:
            self.before.append(before)
            register_module_module_registration_hook(self._note_wrapper)

    def _note_wrapper(self, module: nn.Module, name: str, child: nn.Module) -> None:
        """Note what each DDP wraps: PyTorch calls this for every child, and DDP tells nowhere
        else."""
        if isinstance(module, DistributedDataParallel):
            self.wrapped[child] = weakref.ref(module)
            self.wraps += 1

    def modules(self) -> list[nn.Module]:
        """Return every module that may be trained, in the same order in all processes."""
        return [one for one in self._modules if "measured" in vars(one)]  # not reverted since

    def watch(self) -> None:
        """Have PyTorch call a hook before each step: a module has made its first training pass."""
        if not self._watching:
            self._watching = True
            register_optimizer_step_pre_hook(self._before_step)

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_) -> None:
        """Invalidate the codes of weights, and save the clips whose steps `optimizer` does not
        limit.

        It may write through `.data`, which PyTorch does not count; so clips are counted as changed
        here.
        """
        self.count += 1
        for function in tuple(self.before):  # a function may remove itself
            function(optimizer)
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        limit_shards(self._settle(any(map(is_shard, parameters))))
        self._shards.clear()
        changing = []
        for parameter in parameters:
            state = known_state(parameter)
            if state is None:
                continue
            if state.codes is not None:
                state.codes.stamp = None
            if state.optimizer is not None and state.optimizer() is optimizer:
                continue
            if state.limit and is_shard(parameter):
                part = local(parameter)
                self._shards.append((part, part.clone(), state.limit))
            elif state.limit:
                changing.append(parameter)
                if state.optimizer is not None:
                    state.before = parameter.detach().clone()
            state.optimizer = None
        torch.autograd.graph.increment_version(changing)
        if self._shards and not self._limits_shards:
            self._limits_shards = True
            register_optimizer_step_post_hook(self._after_step)

    def _settle(self, sharded: bool) -> list[tuple[Tensor, float]]:
        """Write measured clips to their shards; return (shard, limit of its steps) for each."""
        found = []
        for module in self.modules():
            measured = module.measured
            measured.before_step(module)
            if sharded or measured.unsettled():
                found += measured.settle(module.clips())
        return found

    @torch.no_grad()
    def _after_step(self, *_) -> None:
        for part, before, limit in self._shards:
            part.clamp_(before * (1 - limit), before * (1 + limit))
        self._shards.clear()


steps = OptimizerSteps()
"""A registry, since optimizers get parameters and no modules."""
