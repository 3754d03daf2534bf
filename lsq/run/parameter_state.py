"""State of parameters that modules and optimizers share: codes of weights, limits of clips.

A module notes here, in its training passes, where the codes of a weight lie and how far a clip may
step. lsq.optim.Adam does both in its step. Other optimizers know nothing of it: a hook before their
steps withdraws codes and keeps where clips were. States lie beside parameters, not on them, so that
copies of parameters take none along.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lsq.program.values import Weight
from lsq.run import shards
from lsq.run.shards import copies
from lsq.run.stamp import Stamp


class WeightCodes:
    """The codes of one weight in memory of their own, and whether they are valid.

    Attributes:
        owner: ids of the weight and of its clip.
        tensors: by the names that programs give them: codes, scale, other layouts.
        fresh: names of the tensors that were written when `stamp` was made.
        stamp: what weight and clip were then; None: nothing is valid. It is exact where a module
            wrote the codes, and not where an optimizer did.
        rounded, rounded_names: where an optimizer writes codes of a new weight, and the names of
            these tensors; None: it cannot.
        clip: the parameter under which it is rounded.
        writers: what a module has prepared to write the codes, by backend, dtype and layouts.
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
        """Return where an optimizer writes the codes of a new weight [N, K], if it can."""
        rounded, clip = self.rounded, self.clip and self.clip()
        if rounded is None or clip is None or rounded.format.packed:
            return None
        if rounded.codes.device != parameter.device:
            return None
        if rounded.codes.shape[1:] != parameter.shape[1:] or len(clip) not in (1, len(parameter)):
            return None  # it has another size by now
        return replace(rounded, clip=clip.detach())

    def written(self, parameter: Tensor) -> None:
        """An optimizer has written the codes of `parameter` to all tensors of `rounded`."""
        self.stamp = Stamp([parameter, self.clip()], exact=False)
        self.fresh = set(self.rounded_names)

    def holds(self, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> bool:
        """Whether there is memory for all of these names and shapes."""
        for name, shape, _ in tensors:
            tensor = self.tensors.get(name)
            if tensor is None or tensor.shape != shape:
                return False
        return True

    def current(self, names: Iterable[str], weight: Tensor, clip: Tensor) -> bool:
        """Whether an optimizer wrote these tensors, and neither weight nor clip changed since.

        Changes are those that PyTorch counts, steps of other optimizers, new memory, and on the CPU
        whatever changes the samples of a Stamp. Memory that other processes write to is never
        current.
        """
        stamp = self.stamp
        if stamp is None or stamp.exact or not self.fresh.issuperset(names):
            return False
        state, of_clip = known_state(weight), known_state(clip)
        if state is None or state.codes is not self:
            return False
        if of_clip is not None and of_clip.before is not None and not of_clip.limited():
            return False  # the module brings the clip back before the next pass
        shared = weight.device.type == "cpu" and weight.is_shared()
        return not shared and stamp.holds([weight, clip])


@dataclass(eq=False)
class ParameterState:
    """The state of one parameter."""

    finalizer: weakref.finalize | None = None
    codes: WeightCodes | None = None
    """The codes of a weight that an optimizer writes."""
    limit: float = 0.0
    """Largest relative change of a clip in a step; 0: any."""
    before: Tensor | None = None
    """Values of a clip in the last training pass, unless an optimizer limits its steps."""
    optimizer: weakref.ref | None = None
    """The optimizer that limits the steps of a clip."""
    bucket_view: weakref.ref | None = None
    """The lsq.run.bucket_views.BucketView of its gradient."""

    def limited(self) -> bool:
        """Whether an optimizer limits the steps of this clip."""
        return self.optimizer is not None and self.optimizer() is not None


_states: dict[int, ParameterState] = {}
"""By the ids of parameters, until these are gone. A registry, since optimizers are given parameters
and no modules. (A WeakTensorKeyDictionary takes ten times as long.)"""


def state_of(parameter: Tensor) -> ParameterState:
    """The state of a parameter, made if there is none."""
    state = _states.get(id(parameter))
    if state is None:
        state = _states[id(parameter)] = ParameterState()
        state.finalizer = weakref.finalize(parameter, _states.pop, id(parameter))
        state.finalizer.atexit = False
    return state


def known_state(parameter: Tensor) -> ParameterState | None:
    """The state of a parameter, if there is one."""
    return _states.get(id(parameter))


def take(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """From now on `optimizer` limits the steps of those of `parameters` that are clips."""
    for parameter in parameters:
        state_of(parameter).optimizer = weakref.ref(optimizer)


def drop(parameter: Tensor) -> None:
    """Leave no state, and no weak reference, which torch.utils.swap_tensors refuses."""
    state = _states.pop(id(parameter), None)
    if state is not None:
        state.finalizer.detach()


def withdraw(parameter: Tensor) -> None:
    """The codes of a weight are not wanted any more."""
    state = known_state(parameter)
    if state is not None and state.codes is not None:
        state.codes.stamp = state.codes.clip = None  # optimizers hold the codes on
        state.codes = None


def forget(clip: Tensor) -> None:
    """`clip` was measured or loaded: where it was before is no limit."""
    state = known_state(clip)
    if state is not None:
        state.before = None


def remember(clips: Iterable[Tensor], limit: float) -> None:
    """A training pass has seen `clips`, which may change by `limit` relatively until the next."""
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
    """Bring clips back to within `step`, relatively, of what the last training pass saw."""
    limited = []
    for clip in clips:
        state = known_state(clip)
        if state is not None and state.before is not None:
            limited.append((clip.data, state.before))
    if limited:
        values, before = map(list, zip(*limited, strict=True))
        torch._foreach_maximum_(values, torch._foreach_mul(before, 1 - step))
        torch._foreach_minimum_(values, torch._foreach_mul(before, 1 + step))


class OptimizerSteps:
    """The steps of all optimizers of this process, from `watch` on.

    Attributes:
        count: how many there were.
        before: functions that are called first of all before each step.
    """

    def __init__(self):
        self.count = 0
        self.before: list[Callable[[Optimizer], None]] = []
        self.watching = self._limits_shards = False
        self._shards: list[tuple[Tensor, Tensor, float]] = []
        """(own part of a clip, its values before the step, limit) where nobody else limits it."""

    def watch(self) -> None:
        """Have PyTorch call a hook before each step: a module has made its first training pass."""
        if not self.watching:
            self.watching = True
            register_optimizer_step_pre_hook(self._before_step)

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, *_) -> None:
        """Withdraw what another optimizer has kept up, of which this one knows nothing.

        It may step through `.data`, which PyTorch does not count: for the codes under clips it is
        counted here.
        """
        self.count += 1
        for function in tuple(self.before):  # one may take itself out
            function(optimizer)
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        limit_shards(shards.settle_all(any(map(shards.is_shard, parameters))))
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
            if state.limit and shards.is_shard(parameter):
                part = shards.local(parameter)
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

    @torch.no_grad()
    def _after_step(self, *_) -> None:
        for part, before, limit in self._shards:
            part.clamp_(before * (1 - limit), before * (1 + limit))
        self._shards.clear()


steps = OptimizerSteps()


def limit_shards(clips: Iterable[tuple[Tensor, float]]) -> None:
    """Note the limits of clips that are shards of FSDP2; see shards.settle_all."""
    for clip, limit in clips:
        state_of(clip).limit = limit
