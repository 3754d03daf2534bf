"""Clips of activations that follow the largest magnitudes of the passes before
(QuantConfig.clips="absmax")."""

from collections.abc import Mapping

import torch

from lsq.quant import SMALLEST_CLIP
from lsq.run import upkeep

KEPT = 63 / 64
"""What a clip keeps of itself in a step of an optimizer without a larger value."""
APART = 4
"""Floats from one number to the next, since kernels want what they read to begin at multiples of 16
bytes."""


class FollowedClips:
    """The largest magnitudes that a module's training passes have rounded since a step, until its
    clips follow them.

    Operations record them while they round (Coded.seen). The next pass takes the larger of that and
    of the clip, which
    has lost a 64th if an optimizer has stepped: so a clip is the largest magnitude of some dozen
    steps, whatever the number of passes in each, and all that is to be saved is the clip. What was
    seen stays until a step, so that nothing changes when a state dict is taken before one. Nobody
    waits for a device. What is not finite counts for nothing, and a clip stays where nothing was
    recorded.
    """

    def __init__(self):
        self._seen: torch.Tensor | None = None
        """[2, clips, APART], the first of each: of training passes since a step, and of passes that
        do not count."""
        self._names: tuple[str, ...] = ()
        self._step = upkeep.steps()

    def __reduce__(self):
        return FollowedClips, ()

    def forget(self) -> None:
        """Nothing was seen: clips are what others have put there."""
        self._seen = None

    @torch.no_grad()
    def follow(self, clips: Mapping[str, torch.Tensor]) -> None:
        """Bring clips, each float32 [1], to what passes have seen, if there were any."""
        stepped, self._step = self._step != upkeep.steps(), upkeep.steps()
        if self._seen is None:
            return
        values = [clips[name].data for name in self._names]
        seen = self._seen[0, :, 0].nan_to_num(0.0, 0.0, 0.0)
        before = torch.cat(values)
        kept = before * KEPT if stepped else before
        after = torch.where(seen > 0, seen.clamp(min=SMALLEST_CLIP).maximum(kept), before)
        torch._foreach_copy_(values, list(after.split(1)))
        if stepped:
            self._seen = None

    @torch.inference_mode(False)  # training may come next
    def begin(self, clips: Mapping[str, torch.Tensor]) -> None:
        """Before a pass: make room for what it will see of these clips."""
        if self._seen is None:
            device = next((clip.device for clip in clips.values()), None)
            self._names = tuple(clips)
            self._seen = torch.zeros(2, len(clips), APART, dtype=torch.float32, device=device)

    def place(self, clip: str, counts: bool) -> torch.Tensor:
        """Where the pass records the largest magnitude that it rounds under a clip, float32 [1].

        `counts`: whether it is a training pass.
        """
        # .data: no backward pass reads it
        return self._seen.data[0 if counts else 1, self._names.index(clip), :1]
