"""Clips of activations that follow the largest magnitudes of the passes before
(QuantConfig.clips="absmax")."""

from collections.abc import Iterable, Mapping

import torch

from lsq.quant import SMALLEST_CLIP
from lsq.run.parameter_state import steps

KEPT = 63 / 64
"""Factor of a clip in an optimizer step without a larger value."""
APART = 4
"""Floats from one number to the next, since kernels want what they read to begin at multiples of 16
bytes."""


class FollowedClips:
    """The largest magnitudes that a module's training passes have rounded since a step, until its
    clips follow them.

    Operations record them while they round (Coded.seen). The next pass takes the larger of that and
    of the clip, which has lost a 64th if an optimizer has stepped: so a clip is the largest
    magnitude of some dozen steps, whatever the number of passes in each, and all that is to be
    saved is the clip. Magnitudes stay until a step, so that nothing changes when a state dict is
    taken before one. Nobody waits for a device. What is not finite counts for nothing, and a clip
    stays where nothing was recorded.
    """

    def __init__(self):
        self._seen: torch.Tensor | None = None
        """[2, clips, APART], the first of each: of training passes since a step, and of passes that
        do not count."""
        self._rows: dict[str, int] = {}
        self._step = steps.count

    def __reduce__(self):
        return FollowedClips, ()

    @property
    def recorded(self) -> bool:
        """Whether there may be magnitudes to follow."""
        return self._seen is not None

    def forget(self) -> None:
        """Nothing was seen: clips are what others have put there."""
        self._seen = None

    def follow(self, clips: Mapping[str, torch.Tensor]) -> None:
        """Bring clips, each float32 [1], to what passes have seen, if there were any."""
        stepped, self._step = self._step != steps.count, steps.count
        if self._seen is None:
            return
        values = [clips[name].data for name in self._rows]
        seen = self._seen[0, :, 0].nan_to_num(0.0, 0.0, 0.0)
        before = torch.cat(values)
        kept = before * KEPT if stepped else before
        after = torch.where(seen > 0, seen.clamp(min=SMALLEST_CLIP).maximum(kept), before)
        torch._foreach_copy_(values, after[:, None].unbind())
        if stepped:
            self._seen[0].zero_()

    def memory(
        self, wanted: Iterable[tuple[str, str]], clips: Mapping[str, torch.Tensor], *, counts: bool
    ) -> dict[str, torch.Tensor]:
        """Return memory, float32 [1] each, in which a pass records the magnitudes that it rounds.

        Args:
            wanted: (name, clip) of what the pass rounds.
            clips: all that may follow, by name.
            counts: whether it is a training pass.
        """
        if self._seen is None:
            self._make_room(clips)
        record = self._seen.data[0 if counts else 1, :, :1]  # .data: no backward pass reads it
        return {name: record[self._rows[clip]] for name, clip in wanted}

    @torch.inference_mode(False)  # training may come next
    def _make_room(self, clips: Mapping[str, torch.Tensor]) -> None:
        device = next((clip.device for clip in clips.values()), None)
        self._rows = {name: row for row, name in enumerate(clips)}
        self._seen = torch.zeros(2, len(clips), APART, dtype=torch.float32, device=device)
