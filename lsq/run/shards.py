"""What passes have measured of clips, until all that are to know of it do.

Under FSDP2 passes see gathered copies of clips, which are gone after them; optimizers step on
shards of the clips. So what passes measure is written to the shards before an optimizer steps, and
steps are limited there. Where several processes train a model, they average it before that
(lsq.dist.replicas).
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Parameter


@runtime_checkable
class HasClips(Protocol):
    """A module whose training passes see clips."""

    def clips(self) -> Mapping[str, Tensor]:
        """All of them by name."""

    def limit_clip_steps(self) -> None:
        """Let no clip have changed by more than a step may."""


LEAST_JUMP, BACK = 0.1, 0.1
"""What the first measurement changes of a clip, relatively, and the share of it that is left when
it was put back."""


@dataclass(eq=False)
class _Seen:
    limit: float = 0.0
    sharded: bool = False
    measured: dict[str, tuple[weakref.ref, Tensor]] = field(default_factory=dict)
    """(the parameter that holds it, value) since shards were written last."""
    news: dict[str, Tensor] = field(default_factory=dict)
    """Values that other processes do not know of yet."""
    before: dict[str, Tensor] = field(default_factory=dict)
    """Clips before they were measured for the first time, until an optimizer steps."""
    stepping: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """(the same, clips before the step), until the next pass."""


_modules: weakref.WeakKeyDictionary[HasClips, _Seen] = weakref.WeakKeyDictionary()


def know(module: HasClips) -> None:
    """`module` may be trained."""
    _modules.setdefault(module, _Seen())


def known() -> list[HasClips]:
    """Every module that may be trained, in the order in which they were made."""
    return list(_modules)


def is_shard(tensor: Tensor) -> bool:
    """Whether it is a DTensor, of which this process has a part."""
    return type(tensor) not in (Tensor, Parameter) and hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if is_shard(tensor) else tensor


def pass_done(module: HasClips, limit: float) -> bool:
    """A training pass of `module` has seen its clips, which are to change by `limit` relatively in
    a step at most.

    Returns:
        whether it saw copies, so that nothing that is done to them lasts.
    """
    seen = _modules.setdefault(module, _Seen())
    seen.limit = limit
    return seen.sharded


def sees_copies(module: HasClips) -> bool:
    """Whether it is known that passes of `module` see gathered copies."""
    return module in _modules and _modules[module].sharded


@torch.no_grad()
def measured(module: HasClips, clips: Mapping[str, Tensor]) -> None:
    """A pass of `module` has measured clips, by names, and written them to what it sees as
    these."""
    if clips:
        # copies, in one launch
        values = torch._foreach_mul([clip.data for clip in clips.values()], 1)
        seen = _modules.setdefault(module, _Seen())
        for (name, clip), value in zip(clips.items(), values, strict=True):
            seen.measured[name] = weakref.ref(clip), value
            seen.news[name] = value


@torch.no_grad()
def measures_first(module: HasClips) -> None:
    """A pass of `module` is to measure its clips for the first time."""
    names, clips = list(module.clips()), [clip.data for clip in module.clips().values()]
    for name, value in zip(names, torch._foreach_mul(clips, 1) if clips else (), strict=True):
        _modules.setdefault(module, _Seen()).before.setdefault(name, value)


@torch.no_grad()
def check_step(module: HasClips) -> None:
    """Look, after the first step, whether it has put clips back to where they were before a pass
    measured them.

    Raises:
        RuntimeError: it has.
    """
    if module not in _modules or not _modules[module].stepping:
        return
    clips, stepping = module.clips(), _modules[module].stepping
    _modules[module].stepping = {}
    compared = [
        (name, clips[name].data, *values)
        for name, values in stepping.items()
        if not is_shard(clips[name])
    ]
    if not compared:
        return
    moved = torch.stack(
        [
            torch.stack(
                [
                    (now - old).abs().mean(),
                    (measured - old).abs().mean(),
                    measured.mean(),
                    old.mean(),
                ]
            )
            for _, now, old, measured in compared
        ]
    )
    for (name, *_), (distance, jump, measured, old) in zip(compared, moved.tolist(), strict=True):
        if jump > LEAST_JUMP * measured and distance < BACK * jump:
            raise RuntimeError(
                f"{type(module).__name__}: a pass has measured {name} as {measured:.4g}, and the"
                " optimizer's step has "
                f"put it back to {old:.4g}: the optimizer has a copy of the parameters that was"
                " made before "
                "(DeepSpeed's ZeRO, for one). Run one batch through the model before"
                " deepspeed.initialize, or "
                "whatever makes the copy"
            )


def news(module: HasClips) -> dict[str, Tensor]:
    """What was measured since this was asked last, by names of clips."""
    seen = _modules.setdefault(module, _Seen())
    found, seen.news = seen.news, {}
    return found


def replace(module: HasClips, name: str, clip: Tensor, value: Tensor) -> None:
    """Let `value` be what is written to a shard, in place of what a pass has measured."""
    _modules[module].measured[name] = weakref.ref(clip), value


def unsettled(module: HasClips) -> set[str]:
    """Names of clips that passes have measured, of which the shards know nothing yet."""
    return set(_modules[module].measured) if module in _modules else set()


def forget(module: HasClips) -> None:
    """Clips of `module` come from elsewhere: what was measured counts no more."""
    if module in _modules:
        _modules[module].measured.clear()
        for kept in (_modules[module].news, _modules[module].before, _modules[module].stepping):
            kept.clear()


@torch.no_grad()
def begin_pass(module: HasClips) -> None:
    """Let gathered copies of clips hold what passes have measured since the shards were written."""
    if sees_copies(module):
        for name, clip in module.clips().items():
            if name in _modules[module].measured:
                clip.data.copy_(_modules[module].measured[name][1])


@torch.no_grad()
def settle(module: HasClips) -> list[tuple[Tensor, float]]:
    """Write what was measured to the clips of `module` that are shards now: (each shard, limit of
    its steps)."""
    seen, found = _modules.setdefault(module, _Seen()), []
    for name, clip in module.clips().items():
        parameter, value = seen.measured.pop(name, (lambda: None, None))
        if is_shard(clip):
            seen.sharded = True
            found.append((clip, seen.limit))
            if parameter() is not None:
                local(clip).copy_(_part_of(value, clip))
    return found


def settle_all(sharded: bool) -> list[tuple[Tensor, float]]:
    """The same for all modules that have trained, before the step of an optimizer; whether it has
    shards."""
    for module, seen in _modules.items():
        if seen.before and isinstance(module, HasClips):
            clips = {
                name: clip.detach().clone()
                for name, clip in module.clips().items()
                if not is_shard(clip)
            }
            seen.stepping = {
                name: (old, clips[name]) for name, old in seen.before.items() if name in clips
            }
            seen.before = {}
    modules = [module for module, seen in _modules.items() if sharded or seen.measured]
    return [one for module in modules if isinstance(module, HasClips) for one in settle(module)]


def _part_of(value: Tensor, clip: Tensor) -> Tensor:
    # there are shards, so it is imported already
    from torch.distributed.tensor import (
        distribute_tensor,
    )

    whole = value.expand(clip.shape).contiguous()
    return distribute_tensor(
        whole, clip.device_mesh, clip.placements, src_data_rank=None
    ).to_local()
