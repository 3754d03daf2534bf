"""What every module that runs a program shares: parameters with clips, calibration, cached codes of weights."""

import logging
import math

import torch
from torch import nn

from lsq import quant
from lsq.config import QuantConfig
from lsq.ops.quantize import weight_reference
from lsq.ops.random import draw_key
from lsq.program.executor import Execution, Hooks
from lsq.program.program import Program

logger = logging.getLogger(__name__)

CLIP = "_clip"
"""Suffix of every clip parameter."""


class ProgramModule(nn.Module):
    """A module that computes by running a program.

    Its parameters have the names that the program uses. A module inside another one (the attention of an encoder
    layer) only holds parameters; the outer module runs them all in one program.

    The buffer `calibrated` (bool) says whether the activations' clips hold measured values. Codes of weights are
    made anew for every training pass, and kept while the module is in eval mode and no gradient is wanted.
    """

    def __init__(self, quantization: QuantConfig):
        super().__init__()
        self.quant = quantization
        self._codes: dict[str, torch.Tensor] = {}
        self._codes_made_from: tuple = ()
        self._observer = None
        self._held_clips: set[str] = set()
        if quantization.quantized:
            self.register_buffer("calibrated", torch.tensor(quantization.activation_init == "fixed"))

    # Construction

    def add_weight(self, name: str, rows: int, columns: int) -> nn.Parameter:
        """A weight [rows, columns], zero so far, with its clip [rows] or [1]."""
        weight = nn.Parameter(torch.zeros(rows, columns))
        self.register_parameter(name, weight)
        if self.quant.quantized:
            clips = rows if self.quant.weight_granularity == "channel" else 1
            self.register_parameter(name + CLIP, nn.Parameter(torch.full((clips,), self.quant.weight_clip)))
        return weight

    def add_bias(self, name: str, size: int) -> nn.Parameter:
        """A bias [size], zero."""
        bias = nn.Parameter(torch.zeros(size))
        self.register_parameter(name, bias)
        return bias

    def add_activation_clips(self, *names: str) -> None:
        """A clip [1] for each activation."""
        if self.quant.quantized:
            for name in names:
                self.register_parameter(name + CLIP, nn.Parameter(torch.full((1,), self.quant.activation_clip)))

    @torch.no_grad()
    def calibrate_weights(self) -> None:
        """Measure the clip of every weight in this module, as `weight_init` says."""
        parameters = dict(self.named_parameters())
        for name, clip in parameters.items():
            weight = parameters.get(name.removesuffix(CLIP))
            if name.endswith(CLIP) and weight is not None:
                clip.copy_(
                    quant.calibrate(
                        weight, self.quant.weight_init, self.quant.bits,
                        per_channel=self.quant.weight_granularity == "channel",
                        fixed=self.quant.weight_clip, percentile=self.quant.percentile,
                    )
                )
        self._codes.clear()

    def check_clips(self) -> None:
        """Refuse clips that no quantiser can work with, as a damaged checkpoint would bring.

        Raises:
            ValueError: a clip is not above 0, NaN or infinite.
        """
        for name, parameter in self.named_parameters():
            if name.endswith(CLIP):
                quant.check_clip(parameter, name)

    # Running

    def wants_backward(self, *inputs: torch.Tensor) -> bool:
        """Whether this call needs a program with a backward pass."""
        return torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (*inputs, *self.parameters())
        )

    def execute(self, program: Program, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run `program` on `inputs` and this module's parameters; the first run calibrates."""
        if self.training:
            self.hold_clips_above_zero()
        tensors = {**dict(self.named_parameters()), **inputs, "random_key": draw_key()}
        if not program.output_gradients:
            tensors.update(self._weight_codes())
        calibrating = self.quant.quantized and not self.calibrated
        hooks = Hooks(
            before=self._calibrate_operation if calibrating else None,
            after=self._observer,
        )
        outputs = Execution(program, hooks)(tensors)
        if calibrating:
            for module in self.modules():
                if isinstance(module, ProgramModule):
                    module.calibrated.fill_(True)
        return outputs

    @torch.no_grad()
    def hold_clips_above_zero(self) -> None:
        """Raise every clip below SMALLEST_CLIP to it, in place, and say so once for each.

        A step of an optimizer is about as long as its learning rate, whatever it steps on, and may take a small
        clip across 0, where it would mean nothing. NaN stays, to be seen.
        """
        clips = {name: clip for name, clip in self.named_parameters() if name.endswith(CLIP)}
        if not clips or not torch.cat([*clips.values()]).lt(quant.SMALLEST_CLIP).any():
            return
        for name, clip in clips.items():
            if clip.lt(quant.SMALLEST_CLIP).any():
                clip.data.clamp_(min=quant.SMALLEST_CLIP)
                if name not in self._held_clips:
                    self._held_clips.add(name)
                    logger.warning(
                        "%s: the optimizer took a clip to 0 or below; it is held just above 0, which makes what it "
                        "clips 0 as well, and may grow again. If many tensors are affected, lower the learning rate.",
                        name,
                    )

    def _calibrate_operation(self, operation, values) -> None:
        """Before an operation rounds an activation: measure the clip that it will round under."""
        if operation.definition.unquantized is None:
            return
        clip = next((t for t in operation.inputs if t is not None and t.name.endswith(CLIP)), None)
        if clip is None:
            return
        inputs = [None if tensor is None else values[tensor] for tensor in operation.inputs]
        measured = quant.calibrate(
            operation.definition.unquantized(*inputs, **operation.attributes), self.quant.activation_init,
            self.quant.bits, fixed=self.quant.activation_clip, percentile=self.quant.percentile,
        )
        values[clip].copy_(measured)

    def _weight_codes(self) -> dict[str, torch.Tensor]:
        """Codes and scale of every weight; kept in eval mode until a parameter changes."""
        if not self.quant.quantized:
            return {}
        parameters = dict(self.named_parameters())
        made_from = tuple((tensor.data_ptr(), tensor._version) for tensor in parameters.values())
        if self._codes and not self.training and self._codes_made_from == made_from:
            return self._codes
        codes = {}
        with torch.no_grad():
            for name, clip in parameters.items():
                weight = parameters.get(name.removesuffix(CLIP))
                if name.endswith(CLIP) and weight is not None:
                    rounded, scale = self.round_weight(weight, clip)
                    codes[name.removesuffix(CLIP) + ".codes"] = rounded
                    codes[name.removesuffix(CLIP) + ".scale"] = scale
        if not self.training:
            self._codes, self._codes_made_from = codes, made_from
        return codes

    def round_weight(self, weight: torch.Tensor, clip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [N, K] and scale [N] of one weight."""
        return weight_reference(weight, clip, bits=self.quant.bits)

    # Whatever may change weights drops the kept codes

    def train(self, mode: bool = True):
        self._codes.clear()
        self.hold_clips_above_zero()
        return super().train(mode)

    def _apply(self, *arguments, **options):
        self._codes.clear()
        return super()._apply(*arguments, **options)

    def _save_to_state_dict(self, *arguments, **options):
        self.hold_clips_above_zero()
        super()._save_to_state_dict(*arguments, **options)

    def _load_from_state_dict(self, *arguments, **options):
        self._codes.clear()
        super()._load_from_state_dict(*arguments, **options)


def initialise_uniform(parameter: torch.Tensor, fan_in: int) -> None:
    """Uniform in ±1/sqrt(fan_in), as torch.nn.Linear draws both weights and biases."""
    bound = 1.0 / math.sqrt(fan_in)
    nn.init.uniform_(parameter, -bound, bound)


def rows_of(x: torch.Tensor, width: int) -> torch.Tensor:
    """x [..., width] as rows [M, width].

    Raises:
        ValueError: another width, or nothing in it.
    """
    if x.shape[-1] != width or x.numel() == 0:
        raise ValueError(f"the input is {tuple(x.shape)}; it must be [..., {width}] and not empty")
    return x.reshape(-1, width)


def key_padding(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A padding mask bool [B, S], or None where it masks nothing."""
    return None if mask is None or not mask.any() else mask.to(torch.bool)
