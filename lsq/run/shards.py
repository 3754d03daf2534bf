"""Clips that passes have measured, until the parameters and all processes hold the values.

Under FSDP2 a pass sees gathered copies of clips, and optimizers step on shards. So the clips that
passes measure are written to the shards before an optimizer steps. If several processes train a
model, they average the clips before that (lsq.dist.replicas).
"""

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

LEAST_JUMP, BACK = 0.1, 0.1
"""LEAST_JUMP: a first measurement is checked if it changes its clip by more than this share. BACK:
the clip was put back if less than this share of the change is left."""


def is_shard(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor; this process holds a part of it."""
    return type(tensor) not in (Tensor, Parameter) and hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_shard(tensor) else tensor


def as_shard(part: Tensor, like: Tensor) -> Tensor:
    """Return this process's rows of a tensor as a shard, as `like` is one; else `part` itself."""
    if not is_shard(like):
        return part
    # imported already, since there are shards
    from torch.distributed.tensor import DTensor

    whole = torch.empty(len(like), *part.shape[1:], device="meta")
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def whole_norm(norm: Tensor, part: Tensor) -> Tensor:
    """Return the norm [1] of all shards from that [1] of this process's; `part` is one of them.
    Every process calls it. A norm of what is no shard is whole."""
    if not is_shard(part):
        return norm
    # imported already, since there are shards
    from torch.distributed.tensor import DTensor

    norms = DTensor.from_local(norm, part.device_mesh, part.placements, run_check=False)
    return norms.full_tensor().norm().view(1)


def shard_number(tensor: Tensor) -> int:
    """Return which shard of a tensor this process holds; 0 if it is in one piece."""
    number = 0
    if is_shard(tensor):
        mesh, where = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_shard():
                number = number * mesh.size(dimension) + where[dimension]
    return number


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors in one launch; torch._foreach_clone is younger than PyTorch 2.11."""
    return list(torch._foreach_mul(tensors, 1)) if tensors else []


class MeasuredClips:
    """The measured clips of one module. A copy of the module starts with none.

    `limit`: largest relative change of a clip in a step. `sharded`: passes see gathered copies of
    clips, so that changes of them do not last.
    """

    def __init__(self):
        self.limit = 0.0
        self.sharded = False
        self._values: dict[str, tuple[weakref.ref, Tensor]] = {}
        """Clip name -> (the parameter that was measured, its value) until shards hold it."""
        self._news: dict[str, Tensor] = {}
        """Values that other processes do not know yet."""
        self._before: dict[str, Tensor] = {}
        """Clips before their first measurement, until an optimizer steps."""
        self._stepping: dict[str, tuple[Tensor, Tensor]] = {}
        """(clip before its first measurement, clip before the step), until the next pass."""

    def __reduce__(self):
        return MeasuredClips, ()

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has just made the first step since the clips were first measured."""
        return bool(self._stepping)

    def note(self, clips: Mapping[str, Tensor]) -> None:
        """Note the values of `clips`, which a pass has measured and written."""
        values = copies([clip.data for clip in clips.values()])
        for (name, clip), value in zip(clips.items(), values, strict=True):
            self._values[name] = weakref.ref(clip), value
            self._news[name] = value

    def measures_first(self, clips: Mapping[str, Tensor]) -> None:
        """Save `clips`: a pass is about to measure them for the first time."""
        values = copies([clip.data for clip in clips.values()])
        self._before = dict(zip(clips, values, strict=True)) | self._before

    def take_news(self) -> dict[str, Tensor]:
        """Return the values measured since the last call, by names of clips."""
        news, self._news = self._news, {}
        return news

    def replace(self, name: str, clip: Tensor, value: Tensor) -> None:
        """Set the value that is written to the shard `clip` in place of the measured one."""
        self._values[name] = weakref.ref(clip), value

    def unsettled(self) -> set[str]:
        """Return the names of clips whose shards do not hold the measured value yet."""
        return set(self._values)

    def forget(self) -> None:
        """Forget all measurements: the clips were set from elsewhere."""
        for kept in (self._values, self._news, self._before, self._stepping):
            kept.clear()

    @torch.no_grad()
    def begin_pass(self, clips: Mapping[str, Tensor]) -> None:
        """Write measured values to the gathered copies of clips."""
        for name, (_, value) in self._values.items():
            if name in clips:
                clips[name].data.copy_(value)

    @torch.no_grad()
    def settle(self, clips: Mapping[str, Tensor]) -> list[tuple[Tensor, float]]:
        """Write measured values to clips that are shards now; return each with its step's limit."""
        found = []
        for name, clip in clips.items():
            parameter, value = self._values.pop(name, (lambda: None, None))
            if is_shard(clip):
                self.sharded = True
                found.append((clip, self.limit))
                if parameter() is not None:
                    local(clip).copy_(part_of(value, clip))
        return found

    def before_step(self, module: nn.Module) -> None:
        """Save the clips of `module` before an optimizer's step, for `check_step`."""
        before, self._before = self._before, {}
        if before:
            clips = module.clips().items()
            now = {name: one.detach().clone() for name, one in clips if not is_shard(one)}
            for name, (_, value) in self._values.items():
                if name in now and now[name].shape != value.shape:
                    now[name] = value  # DeepSpeed's ZeRO 3 has emptied the clip after the pass
            self._stepping = {name: (old, now[name]) for name, old in before.items() if name in now}

    @torch.no_grad()
    def check_step(self, clips: Mapping[str, Tensor], owner: str) -> None:
        """Raise RuntimeError if the first step has undone the first measurement of clips."""
        stepping, self._stepping = self._stepping, {}
        rows = {
            name: torch.stack(
                [
                    (clips[name].data - old).abs().mean(),
                    (measured - old).abs().mean(),
                    measured.mean(),
                    old.mean(),
                ]
            )
            for name, (old, measured) in stepping.items()
            if not is_shard(clips[name])
        }
        means = (
            torch.stack(list(rows.values())).tolist() if rows else ()
        )  # waits for the device once
        for name, (distance, jump, measured, old) in zip(rows, means, strict=True):
            if jump > LEAST_JUMP * measured and distance < BACK * jump:
                raise RuntimeError(
                    f"{owner}: a pass has measured {name} as {measured:.4g}, and the optimizer's"
                    f" step has put it back to {old:.4g}: the optimizer has a copy of the"
                    " parameters that was made before (DeepSpeed's ZeRO, for one). Add a line that"
                    " runs one batch, model(**batch), before deepspeed.initialize, or whatever"
                    " makes the copy"
                )


def part_of(value: Tensor, clip: Tensor) -> Tensor:
    """Return this process's part of `value` as the shard `clip` is split."""
    # imported already, since there are shards
    from torch.distributed.tensor import distribute_tensor

    whole = value.expand(clip.shape).contiguous()
    return distribute_tensor(
        whole, clip.device_mesh, clip.placements, src_data_rank=None
    ).to_local()
