"""Clips that passes have measured, until the parameters and all processes hold the values.

Under FSDP2 a pass sees gathered copies of clips; optimizers step on shards. So what passes measure
is written to the shards before an optimizer steps. Where several processes train a model, they
average it before that (lsq.dist.replicas).
"""

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

LEAST_JUMP, BACK = 0.1, 0.1
"""What the first measurement changes of a clip, relatively, and the share of it that is left when
it was put back."""


def is_shard(tensor: Tensor) -> bool:
    """Whether it is a DTensor, of which this process has a part."""
    return type(tensor) not in (Tensor, Parameter) and hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_shard(tensor) else tensor


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies in one launch; torch._foreach_clone is younger than PyTorch 2.11."""
    return list(torch._foreach_mul(tensors, 1)) if tensors else []


class MeasuredClips:
    """The measured clips of one module. A copy of a module has none.

    `limit`: largest relative change of a clip in a step. `sharded`: passes see gathered copies, so
    that nothing that is done to them lasts.
    """

    def __init__(self):
        self.limit = 0.0
        self.sharded = False
        self._values: dict[str, tuple[weakref.ref, Tensor]] = {}
        """(the parameter that holds it, value) since shards were written last."""
        self._news: dict[str, Tensor] = {}
        """Values that other processes do not know of yet."""
        self._before: dict[str, Tensor] = {}
        """Clips before they were measured for the first time, until an optimizer steps."""
        self._stepping: dict[str, tuple[Tensor, Tensor]] = {}
        """(the same, clips before the step), until the next pass."""

    def __reduce__(self):
        return MeasuredClips, ()

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has made its first step since clips were measured first."""
        return bool(self._stepping)

    def note(self, clips: Mapping[str, Tensor]) -> None:
        """A pass has measured clips, and written them to what it sees as these."""
        values = copies([clip.data for clip in clips.values()])
        for (name, clip), value in zip(clips.items(), values, strict=True):
            self._values[name] = weakref.ref(clip), value
            self._news[name] = value

    def measures_first(self, clips: Mapping[str, Tensor]) -> None:
        """A pass is about to measure these clips for the first time."""
        values = copies([clip.data for clip in clips.values()])
        self._before = dict(zip(clips, values, strict=True)) | self._before

    def take_news(self) -> dict[str, Tensor]:
        """Values measured since this was asked last, by names of clips."""
        news, self._news = self._news, {}
        return news

    def replace(self, name: str, clip: Tensor, value: Tensor) -> None:
        """Write `value` to a shard, in place of what a pass has measured."""
        self._values[name] = weakref.ref(clip), value

    def unsettled(self) -> set[str]:
        """Names of clips of which the shards do not hold the measured value yet."""
        return set(self._values)

    def forget(self) -> None:
        """Clips come from elsewhere: what was measured counts no more."""
        for kept in (self._values, self._news, self._before, self._stepping):
            kept.clear()

    @torch.no_grad()
    def begin_pass(self, clips: Mapping[str, Tensor]) -> None:
        """Let gathered copies of clips hold what passes have measured."""
        for name, (_, value) in self._values.items():
            if name in clips:
                clips[name].data.copy_(value)

    @torch.no_grad()
    def settle(self, clips: Mapping[str, Tensor]) -> list[tuple[Tensor, float]]:
        """Write what was measured to clips that are shards now: (each, limit of its steps)."""
        found = []
        for name, clip in clips.items():
            parameter, value = self._values.pop(name, (lambda: None, None))
            if is_shard(clip):
                self.sharded = True
                found.append((clip, self.limit))
                if parameter() is not None:
                    local(clip).copy_(_part_of(value, clip))
        return found

    def before_step(self, module: nn.Module) -> None:
        """An optimizer is about to step: keep what the clips of `module` are now, to compare."""
        before, self._before = self._before, {}
        if before:
            clips = module.clips().items()
            now = {name: one.detach().clone() for name, one in clips if not is_shard(one)}
            self._stepping = {name: (old, now[name]) for name, old in before.items() if name in now}

    @torch.no_grad()
    def check_step(self, clips: Mapping[str, Tensor], owner: str) -> None:
        """Raise RuntimeError where the first step has put clips back to where they were before a
        pass measured them."""
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
        means = torch.stack(list(rows.values())).tolist() if rows else ()  # waits once
        for name, (distance, jump, measured, old) in zip(rows, means, strict=True):
            if jump > LEAST_JUMP * measured and distance < BACK * jump:
                raise RuntimeError(
                    f"{owner}: a pass has measured {name} as {measured:.4g}, and the optimizer's"
                    f" step has put it back to {old:.4g}: the optimizer has a copy of the"
                    " parameters that was made before (DeepSpeed's ZeRO, for one). Run one batch"
                    " through the model before deepspeed.initialize, or whatever makes the copy"
                )


def _part_of(value: Tensor, clip: Tensor) -> Tensor:
    # there are shards, so it is imported already
    from torch.distributed.tensor import distribute_tensor

    whole = value.expand(clip.shape).contiguous()
    return distribute_tensor(
        whole, clip.device_mesh, clip.placements, src_data_rank=None
    ).to_local()
