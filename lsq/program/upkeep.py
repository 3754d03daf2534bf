"""What a module leaves to the optimizer of its parameters: limits of clips, and codes of new weights.

Modules say at every training pass what they want of a parameter, optimizers such as lsq.optim.Adam do it in their step.
Where no such optimizer is at work, nothing here has an effect. It is kept beside the parameters, not on them, so that
no copy of a parameter takes it along.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from lsq.program.values import Weight

PROBES = 61
"""Values of a weight on the CPU that are compared, for changes that PyTorch does not count."""


@dataclass(eq=False)
class Upkeep:
    """Of one parameter."""

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
    made_from: tuple = ()
    """What weight and clip were when an optimizer wrote the codes."""
    probe: torch.Tensor | None = field(default=None, repr=False)


_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def of(parameter: torch.Tensor) -> Upkeep:
    """That of a parameter, which changes in place."""
    found = _kept.get(parameter)
    if found is None:
        found = _kept[parameter] = Upkeep()
    return found


def remember(clips: Iterable[torch.Tensor], limit: float) -> None:
    """A training pass has seen `clips`, which are to change by `limit` relatively at most until the next one."""
    free = []
    for clip in clips:
        kept = of(clip)
        kept.limit, kept.before = limit, None
        if kept.optimizer is None or kept.optimizer() is None:
            free.append(clip)
    for clip, before in zip(free, torch._foreach_clone([clip.data for clip in free]) if free else (), strict=True):
        of(clip).before = before


def forget(clip: torch.Tensor) -> None:
    """`clip` is measured or loaded: where it was before is no limit."""
    of(clip).before = None


def offer(weight: torch.Tensor, clip: torch.Tensor, rounded: Weight) -> None:
    """`rounded` holds codes and scale, where those of `weight` [N, K] under `clip` [N] or [1] belong from now on."""
    kept = of(weight)
    if not _lie_at(kept, rounded.codes) or kept.clip() is not clip:
        kept.rounded, kept.clip, kept.made_from = rounded, weakref.ref(clip), ()


def withdraw(weight: torch.Tensor) -> None:
    """The codes of `weight` are of no use any more."""
    kept = of(weight)
    kept.rounded, kept.clip, kept.made_from, kept.probe = None, None, (), None


def made(weight: torch.Tensor) -> None:
    """An optimizer has written the codes of `weight`."""
    kept = of(weight)
    kept.made_from = (*_stamp(weight), *_stamp(kept.clip()))
    kept.probe = _probe(weight)


def current(weight: torch.Tensor, clip: torch.Tensor, codes: torch.Tensor) -> bool:
    """Whether `codes` are those of `weight` under `clip` because an optimizer has made them, and nothing changed since.

    Changes are those that PyTorch counts, and new memory. On the CPU some values are compared as well, so that a change
    through `.data` of more than a few values is noticed.
    """
    kept = of(weight)
    return (
        _lie_at(kept, codes)
        and kept.made_from == (*_stamp(weight), *_stamp(clip))
        and (kept.probe is None or torch.equal(kept.probe, _probe(weight)))
    )


def _lie_at(kept: Upkeep, codes: torch.Tensor) -> bool:
    """Whether that is the memory where codes belong."""
    return kept.rounded is not None and kept.rounded.codes.data_ptr() == codes.data_ptr()


def _stamp(parameter: torch.Tensor) -> tuple:
    return weakref.ref(parameter.untyped_storage()), parameter.data_ptr(), parameter._version


def _probe(weight: torch.Tensor) -> torch.Tensor | None:
    """Values all over a weight; None on a GPU, where comparing would wait."""
    if weight.device.type != "cpu":
        return None
    return weight.detach().flatten()[:: max(1, weight.numel() // PROBES)].clone()


def take(optimizer: Optimizer, parameters) -> None:
    """From now on `optimizer` limits the steps of those of `parameters` that are clips."""
    for parameter in parameters:
        of(parameter).optimizer = weakref.ref(optimizer)


@torch.no_grad()
def _before_step(optimizer: Optimizer, *_) -> None:
    """Before any optimizer steps: what another one has kept up is this one's now, and it knows nothing of it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept = _kept.get(parameter)
            if kept is None:
                continue
            kept.made_from = ()
            if kept.optimizer is not None and kept.optimizer() is not optimizer:
                kept.optimizer = None
                if kept.limit:
                    kept.before = parameter.detach().clone()


register_optimizer_step_pre_hook(_before_step)
