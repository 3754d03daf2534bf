"""When a module measures its clips, by how many training passes it has made.

Plain numbers, so that nobody waits for a device to decide. Checkpoints hold them as tensors beside the parameters.
"""

import math

import torch

from lsq.config import QuantConfig

ACTIVATIONS_AT = frozenset(2**k for k in range(1, 32))
WEIGHTS_AT = frozenset(math.ceil(2 ** (k / 8)) for k in range(8, 8 * 32))
"""Weights outgrow their clips between two powers of two, and what is clipped gets no gradient."""


ROUNDING = 2**-7
"""What a mean of zeros or of ones may be off, in bfloat16."""
NEVER = -1
"""In place of the number of passes: clips hold nothing yet, and the first pass measures all of them."""


def recomputing() -> bool:
    """Whether a backward pass is going on, which runs a forward pass again: gradient checkpointing."""
    return torch._C._current_graph_task_id() != -1


class Schedule:
    """The state of one module.

    Attributes:
        calibrated: whether the clips of activations hold measured values.
        passes: training passes so far, each counted once if gradient checkpointing runs it again; or NEVER.
        fallen: whether the module goes on in floats, so that no clip is measured any more.
    """

    NAMES = ("calibrated", "passes", "fallen")
    """In state dicts: float64 [], so that the mean of several state dicts means something."""
    MOST_PASSES = 2**40
    """Beyond any training: a thousand passes a second for thirty years."""

    def __init__(self, quantization: QuantConfig):
        self._quant = quantization
        self.passes = self._activations_at = self._weights_at = 0
        self.fallen = False
        self._uncounted = False
        """Whether the last pass had no gradients, but may be run again with them."""
        self.restart()

    @property
    def begun(self) -> bool:
        """Whether clips hold anything."""
        return self.passes != NEVER

    def restart(self) -> None:
        """The clips of activations are not measured any more; fixed ones need not be."""
        self.calibrated = self._quant.activation_init == "fixed"

    def forget(self) -> None:
        """No clip is measured any more."""
        if self._quant.quantized:
            self.passes = NEVER
            self.restart()

    def activations_due(self, training: bool, again: bool = False) -> bool:
        """Whether the next pass measures the clips of activations: the first does, and training passes 2, 4, 8, ...

        `again`: it is no new one, see `recomputing`.
        """
        anew = training and not again and self._within(ACTIVATIONS_AT) and self._activations_at != self.passes
        return self._rounds and (not self.calibrated or anew)

    def weights_due(self, training: bool, again: bool = False) -> bool:
        """Whether the next pass measures the clips of weights: training passes 2, 3, 4, ..., each time 9 % later."""
        anew = training and not again and self._within(WEIGHTS_AT) and self._weights_at != self.passes
        return self._rounds and (not self.begun or (anew and self._quant.weight_init != "fixed"))

    @property
    def _rounds(self) -> bool:
        return self._quant.quantized and not self.fallen

    def _within(self, passes: frozenset[int]) -> bool:
        return self.passes in passes and self.passes <= self._quant.calibration_passes

    def measured_activations(self) -> None:
        """The clips of activations hold what this pass measured."""
        self.calibrated, self._activations_at = True, self.passes

    def measured_weights(self) -> None:
        """The same of weights."""
        self.passes = max(self.passes, 0)
        self._weights_at = self.passes

    def count(self, again: bool, *, trained: bool) -> None:
        """A pass in training mode is through. `trained`: it goes back.

        The kind of checkpointing that goes forward without gradients, and then again with them, counts the second time.
        """
        if trained and (not again or self._uncounted):
            self.passes += 1
        self._uncounted = not trained

    def save(self, destination: dict[str, torch.Tensor], prefix: str) -> None:
        """Put the state into a state dict."""
        for name in self.NAMES:
            value = float(getattr(self, name))
            destination[prefix + name] = torch.tensor(value, dtype=torch.float64, device="cpu")

    def load(self, state_dict: dict[str, torch.Tensor], prefix: str) -> list[str]:
        """Take the state out of a state dict, or the mean of several; the names that it lacks.

        One without `fallen` is of an earlier version, where nothing falls; there they are bool and int64. Where some
        of several had clips that nobody had measured, all are measured anew.

        Raises:
            ValueError: one is out of its range.
        """
        given = {name: state_dict.pop(prefix + name, None) for name in self.NAMES}
        for name, value in given.items():
            least, most = (NEVER, self.MOST_PASSES) if name == "passes" else (0, 1)
            found = math.nan if value is None or value.numel() != 1 else float(value)
            if value is not None and not least <= found <= most + ROUNDING:
                raise ValueError(
                    f"{prefix}{name} in the checkpoint is {value.tolist()}; it must be a number "
                    f"from {least} to {most}: load a sound checkpoint"
                )
        known = {name: float(value) for name, value in given.items() if value is not None}
        if known:
            self.fallen = known.get("fallen", 0.0) > ROUNDING
        if "passes" in known:
            self.passes = round(known["passes"])
        if "calibrated" in known:
            self.calibrated = known["calibrated"] > 1 - ROUNDING
            if not self.calibrated and known["calibrated"] > ROUNDING:
                self.forget()
        return [prefix + name for name in self.NAMES if name not in {*known, "fallen"}]
