"""When a module measures its clips: Python counts passes, and waits for no device."""

import math
from collections.abc import Mapping

import torch

from lsq.config import QuantConfig
from lsq.run.parameter_state import steps

WINDOW, WIDEST = 8, 32
"""Consecutive passes that measure activations, so that alternating kinds of batches all count:
WINDOW, or the passes between two steps of an optimizer if these are more, up to WIDEST."""
WEIGHTS_AT = frozenset(math.ceil(2 ** (k / 8)) for k in range(8, 8 * 32))
"""Numbers of the passes that measure weights, each 9 % above the last: weights outgrow their clips,
and clipped values get no gradient."""
FALLEN = "fallen"
"""The name of `float_fallback` in state dicts of earlier versions."""
ROUNDING = 2**-7
"""Largest error of a mean of zeros or ones in bfloat16."""
NEVER = -1
"""The number of passes while no clip holds a value: the first pass measures all."""


def recomputing() -> bool:
    """Whether a backward pass runs a forward pass again: gradient checkpointing."""
    return torch._C._current_graph_task_id() != -1


class Schedule:
    """The schedule of one module.

    `calibrated`: clips of activations are measured. `passes`: training passes, counted once under
    gradient checkpointing, or NEVER. `float_fallback`: the module goes on in floats.
    """

    NAMES = ("calibrated", "passes", "float_fallback")
    """Entries of state dicts: float64 [], so that state dicts can be averaged."""
    MOST_PASSES = 2**40

    def __init__(self, quantization: QuantConfig):
        self._quant = quantization
        self.passes = 0
        self.float_fallback = False
        self._begin_anew()
        self.restart()

    def _begin_anew(self) -> None:
        """Reset what state dicts do not hold."""
        self._window = self._measured_at = NEVER
        """The pass that began the last window of measurements, and the last pass that measured."""
        self._weights_at = 0
        self._looks = 0
        """Passes without gradients that have measured activations since a pass was counted."""
        self._step = self._in_step = self._uses = 0
        """Steps of optimizers at the last counted pass; passes since that step; the most so far."""
        self._uncounted = False
        """Whether the last pass had no gradients; checkpointing may run it again with them."""

    def restart(self) -> None:
        """Treat clips of activations as not measured, unless they are fixed."""
        self.calibrated = self._quant.clip_init == "fixed"

    @property
    def begun(self) -> bool:
        """Whether clips hold values."""
        return self.passes != NEVER

    def forget(self) -> None:
        """Treat all clips as not measured."""
        if self._quant.quantized:
            self.passes = NEVER
            self.restart()

    def activations_due(
        self, training: bool, again: bool = False, *, trained: bool = False
    ) -> bool:
        """Whether the next pass measures the clips of activations.

        The first pass begins a window of passes that do; if clips learn, so do training passes 2,
        4, 8, ... A pass that runs `again` measures nothing, nor does a `trained` pass if passes
        without gradients have measured in its place.
        """
        if not self._rounds or not self.calibrated:
            return self._rounds
        start, uses = self._window_start, self._uses
        uses += not self._quant.learned  # in the first step, count this pass, too
        width = min(max(WINDOW, uses), WIDEST)
        looks = self._looks if self._measured_at == self.passes else 0
        due = self.passes - start < width and looks < (1 if trained else width)
        return due and training and not again and max(start, 1) <= self._quant.calibration_passes

    @property
    def _window_start(self) -> int:
        if not self._quant.learned:
            return 0  # later clips follow the magnitudes that passes record
        return 1 << (self.passes.bit_length() - 1) if self.passes > 1 else 0

    @property
    def widens(self) -> bool:
        """Whether measuring may only raise clips: an earlier pass of the window has measured."""
        start = self._window_start
        return self.calibrated and (self._window == start or self.passes > start)

    def weights_due(self, training: bool, again: bool = False) -> bool:
        """Whether the next pass measures the clips of weights: training passes WEIGHTS_AT."""
        if not self._rounds or not self.begun:
            return self._rounds
        due = self.passes in WEIGHTS_AT and self.passes <= self._quant.calibration_passes
        measured = self._weights_at == self.passes or self._quant.clip_init == "fixed"
        return due and training and not again and self._quant.learned and not measured

    @property
    def _rounds(self) -> bool:
        return self._quant.quantized and not self.float_fallback

    def measured_activations(self, *, trained: bool) -> None:
        """Note that a pass has measured clips of activations; `trained`: it has a backward."""
        looks = self._looks if self._measured_at == self.passes else 0
        self._looks = looks if trained else looks + 1
        self.calibrated, self._window, self._measured_at = True, self._window_start, self.passes

    def measured_weights(self) -> None:
        self.passes = max(self.passes, 0)
        self._weights_at = self.passes

    def count(self, again: bool, *, trained: bool) -> None:
        """Count a pass in training mode; a pass without gradients counts when it runs again."""
        if trained and (not again or self._uncounted):
            self.passes += 1
            step, self._step = self._step, steps.count
            self._in_step = self._in_step + 1 if step == self._step else 1
            self._uses = max(self._uses, self._in_step)
        self._uncounted = not trained

    def save(self, destination: dict[str, torch.Tensor], prefix: str) -> None:
        for name in self.NAMES:
            value = float(getattr(self, name))
            destination[prefix + name] = torch.tensor(value, dtype=torch.float64, device="cpu")

    def load(self, state_dict: dict[str, torch.Tensor], prefix: str) -> list[str]:
        """Take the state, or a mean of several, out of a state dict; return the missing names.

        If only some of the averaged states had measured clips, all clips are measured anew. Raises
        ValueError for a number out of range.
        """
        fallen = state_dict.pop(prefix + FALLEN, None)
        if fallen is not None:
            state_dict.setdefault(prefix + "float_fallback", fallen)
        known = {}
        for name in self.NAMES:
            value = state_dict.pop(prefix + name, None)
            if value is None:
                continue
            least, most = (NEVER, self.MOST_PASSES) if name == "passes" else (0, 1)
            known[name] = float(value) if value.numel() == 1 else math.nan
            if not least <= known[name] <= most + ROUNDING:
                raise ValueError(
                    f"{prefix}{name} in the checkpoint is {value.tolist()}; it must be a number "
                    f"from {least} to {most}: load a sound checkpoint"
                )
        if known:
            self.float_fallback = known.get("float_fallback", 0.0) > ROUNDING
        if "passes" in known:
            self.passes = round(known["passes"])
        if "calibrated" in known:
            self.calibrated = known["calibrated"] > 1 - ROUNDING
            if not self.calibrated and known["calibrated"] > ROUNDING:
                self.forget()
        self._begin_anew()
        return [prefix + name for name in self.NAMES if name not in {*known, "float_fallback"}]


def renamed(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict in which `fallen` of earlier versions is `float_fallback`."""
    old = {name for name in state if name.rpartition(".")[2] == FALLEN}
    return {
        name.removesuffix(FALLEN) + "float_fallback" if name in old else name: value
        for name, value in state.items()
    }
