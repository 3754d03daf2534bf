"""What a module leaves to the optimizer of its parameters: limits of clips, and codes of new
weights.

Modules say at every training pass what they want of a parameter, optimizers such as lsq.optim.Adam
do it in their step. Where no such optimizer is at work, nothing here has an effect. It is kept
beside the parameters, not on them, so that no copy of a parameter takes it along.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lsq.program.values import Weight
from lsq.run import shards
from lsq.run.stamp import Stamp


@dataclass(eq=False)
class Upkeep:
    """Of one parameter."""

    end: weakref.finalize | None = None
    """What takes it out of what is kept."""
    optimizer: weakref.ref | None = None
    """Who limits the steps of a clip."""
    limit: float = 0.0
    """Of a clip: largest relative change in a step; 0: any."""
    before: torch.Tensor | None = None
    """Of a clip: where the last training pass saw it, unless an optimizer limits its steps."""
    rounded: Weight | None = None
    """Of a weight: where its codes belong."""
    clip: weakref.ref | None = None
    """Of a weight: the parameter under which it is rounded."""
    made_from: Stamp | None = None
    """What weight and clip were when an optimizer wrote the codes."""


_kept: dict[int, Upkeep] = {}
"""By the ids of parameters, until these are gone. (A WeakTensorKeyDictionary takes ten times as
long.)"""
_made: weakref.WeakValueDictionary[int, Upkeep] = weakref.WeakValueDictionary()
"""By the addresses of codes: whose they are, if an optimizer was the last to write them."""


def of(parameter: torch.Tensor) -> Upkeep:
    """That of a parameter, which changes in place."""
    found = _kept.get(id(parameter))
    if found is None:
        found = _kept[id(parameter)] = Upkeep()
        found.end = weakref.finalize(parameter, _kept.pop, id(parameter))
        found.end.atexit = False
    return found


def before(clip: torch.Tensor) -> torch.Tensor | None:
    """Where the last training pass saw a clip, if that limits it."""
    kept = _kept.get(id(clip))
    return None if kept is None else kept.before


def drop(parameter: torch.Tensor) -> None:
    """Leave nothing, not even a weak reference: torch.utils.swap_tensors wants none."""
    kept = _kept.pop(id(parameter), None)
    if kept is not None:
        kept.end.detach()


def remember(clips: Iterable[torch.Tensor], limit: float) -> None:
    """A training pass has seen `clips`, which are to change by `limit` relatively at most until the
    next one."""
    free = []
    for clip in clips:
        kept = of(clip)
        kept.limit, kept.before = limit, None
        if clip.requires_grad and not _has_optimizer(kept):
            free.append(clip)
    # Times 1: copies in one launch; torch._foreach_clone is younger than PyTorch 2.11.
    for clip, before in zip(
        free, torch._foreach_mul([clip.data for clip in free], 1) if free else (), strict=True
    ):
        of(clip).before = before


def forget(clip: torch.Tensor) -> None:
    """`clip` is measured or loaded: where it was before is no limit."""
    if id(clip) in _kept:
        of(clip).before = None


def offer(weight: torch.Tensor, clip: torch.Tensor, rounded: Weight) -> None:
    """A pass has written codes and scale of `weight` [N, K] under `clip` [N] or [1] to `rounded`.

    They belong there from now on.
    """
    _made.pop(rounded.codes.data_ptr(), None)
    kept = of(weight)
    if not _lie_at(kept, rounded) or kept.clip() is not clip:
        kept.rounded, kept.clip, kept.made_from = rounded, weakref.ref(clip), None


def withdraw(weight: torch.Tensor) -> None:
    """The codes of `weight` are of no use any more."""
    if id(weight) in _kept:
        kept = of(weight)
        kept.rounded, kept.clip, kept.made_from = None, None, None


def made(weight: torch.Tensor) -> None:
    """An optimizer has written the codes of `weight`."""
    kept = of(weight)
    kept.made_from = Stamp([weight, kept.clip()], exact=False)
    _made[kept.rounded.codes.data_ptr()] = kept


def current(weight: torch.Tensor, clip: torch.Tensor, rounded: Weight) -> bool:
    """Whether `rounded` holds codes of `weight` under `clip` that an optimizer has made, and
    nothing changed since.

    Changes are those that PyTorch counts, steps of other optimizers, new memory, and on the CPU
    whatever changes the samples of a Stamp. Of memory that other processes write to, nobody knows.
    """
    kept = of(weight)
    return (
        _lie_at(kept, rounded)
        and _made.get(rounded.codes.data_ptr()) is kept
        and not _limited_later(of(clip))
        and kept.made_from is not None
        and kept.made_from.holds([weight, clip])
        and not (weight.device.type == "cpu" and weight.is_shared())
    )


def _limited_later(clip: Upkeep) -> bool:
    """Whether a module brings the clip back after a step, when codes under it are made already."""
    return clip.before is not None and not _has_optimizer(clip)


def _has_optimizer(clip: Upkeep) -> bool:
    return clip.optimizer is not None and clip.optimizer() is not None


def _lie_at(kept: Upkeep, rounded: Weight) -> bool:
    """Whether that is the memory where codes belong, in all layouts."""
    return kept.rounded is not None and _addresses(kept.rounded) == _addresses(rounded)


def _addresses(rounded: Weight) -> list[int]:
    return [tensor.data_ptr() for tensor in rounded.written]


def take(optimizer: Optimizer, parameters) -> None:
    """From now on `optimizer` limits the steps of those of `parameters` that are clips."""
    for parameter in parameters:
        of(parameter).optimizer = weakref.ref(optimizer)


agreements: list[Callable[[Optimizer], None]] = []
"""What is called first of all before any optimizer steps."""
_steps = 0


def steps() -> int:
    """Count the steps of all optimizers so far."""
    return _steps


_shards_before: list[tuple[torch.Tensor, torch.Tensor, float]] = []
"""(own part, what it was before the step of an optimizer that limits nothing, limit) of clips under
FSDP2."""


def limit_shards(found: Iterable[tuple[torch.Tensor, float]]) -> None:
    """Let clips under FSDP2 change by so much at most: `found` is of lsq.run.shards."""
    for clip, limit in found:
        of(clip).limit = limit


@torch.no_grad()
def _before_step(optimizer: Optimizer, *_) -> None:
    """Before any optimizer steps: what another one has kept up is this one's now, and it knows
    nothing of it.

    It may step through `.data`, which PyTorch does not count: of clips it is counted here, for the
    codes under them.
    """
    global _steps
    _steps += 1
    for agree in tuple(agreements):  # one may take itself out
        agree(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    limit_shards(shards.settle_all(any(map(shards.is_shard, parameters))))
    _shards_before.clear()
    changing = []
    for parameter in parameters:
        kept = _kept.get(id(parameter))
        if kept is None:
            continue
        kept.made_from = None
        limits = kept.optimizer is not None and kept.optimizer() is optimizer
        if kept.limit and not limits:
            if shards.is_shard(parameter):
                part = shards.local(parameter)
                _shards_before.append((part, part.clone(), kept.limit))
            else:
                changing.append(parameter)
                if kept.optimizer is not None:
                    kept.before = parameter.detach().clone()
        if not limits:
            kept.optimizer = None
    torch.autograd.graph.increment_version(changing)


@torch.no_grad()
def _after_step(*_) -> None:
    for part, before, limit in _shards_before:
        part.clamp_(before * (1 - limit), before * (1 + limit))
    _shards_before.clear()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
