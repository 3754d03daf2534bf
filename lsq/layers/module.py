"""What every module that runs a program shares: parameters with clips, calibration, cached codes of weights."""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import nn

from lsq import quant
from lsq.config import QuantConfig
from lsq.ops.calibration import calibrate
from lsq.ops.quantize import weight_reference
from lsq.ops.random import draw_key
from lsq.program import rehearsal
from lsq.program.executor import Execution, Hooks
from lsq.program.frames import StepMemory
from lsq.program.program import Program

CLIP = "_clip"
"""Suffix of every clip parameter."""
_BEFORE = "_clip_before"
_CALIBRATED_AT = frozenset(2**k for k in range(1, 32))
_WEIGHTS_CALIBRATED_AT = frozenset(math.ceil(2 ** (k / 8)) for k in range(8, 8 * 32))
"""Weights outgrow their clips between two powers of two, and what is clipped gets no gradient."""


def beside_the_graph(method: Callable) -> Callable:
    """Decorate a method that runs a program: torch.compile breaks its graph there and calls the method as it is."""
    return torch.compiler.disable(
        method,
        reason="a layer of lsq is a program of fused operations already and runs beside the compiled graph; "
        "compile without fullgraph=True",
    )


class ProgramModule(nn.Module):
    """A module that computes by running a program.

    Its parameters have the names that the program uses. A module inside another one (the attention of an encoder
    layer) only holds parameters; the outer module runs them all in one program.

    The buffer `calibrated` (bool) says whether the activations' clips hold measured values, `passes` (int64) counts
    training passes: clips are measured in the first one and again while tensors still grow fast. Codes of weights are
    made anew for every training pass, and kept while the module is in eval mode and no gradient is wanted.

    `step_memory` is where the tensors of its training passes lie, if that was planned (see `lsq.layers.memory`).
    """

    def __init__(self, quantization: QuantConfig):
        super().__init__()
        self.quant = quantization
        self._codes: dict[str, torch.Tensor] = {}
        self._codes_made_from: tuple = ()
        self._observer = None
        self._measured_at = self._weights_measured_at = 0
        self.step_memory: StepMemory | None = None
        if quantization.quantized:
            self.register_buffer("calibrated", torch.tensor(quantization.activation_init == "fixed"))
            self.register_buffer("passes", torch.tensor(0))

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

    def calibrate_weights(self) -> None:
        """Measure the clip of every weight in this module, as `weight_init` says."""
        self._measure_weights()
        torch.autograd.graph.increment_version(self._clips().values())

    @torch.no_grad()
    def _measure_weights(self) -> None:
        """The same, unseen by autograd: an earlier pass of this module may still await its backward pass."""
        parameters = dict(self.named_parameters())
        for name, clip in self._clips().items():
            weight = parameters.get(name.removesuffix(CLIP))
            if weight is not None:
                with naming(name.removesuffix(CLIP)):
                    measured = calibrate(
                        weight, self.quant.weight_init, self.quant.bits,
                        per_channel=self.quant.weight_granularity == "channel",
                        fixed=self.quant.weight_clip, percentile=self.quant.percentile,
                    )
                clip.data.copy_(measured)
        self._codes.clear()
        self._forget_clips()

    def _clips(self) -> dict[str, nn.Parameter]:
        """Every clip in this module by name."""
        return {name: parameter for name, parameter in self.named_parameters() if name.endswith(CLIP)}

    def check_clips(self) -> None:
        """Refuse clips that no quantiser can work with, as a damaged checkpoint would bring.

        Raises:
            ValueError: a clip is not above 0, NaN or infinite.
        """
        for name, clip in self._clips().items():
            quant.check_clip(clip, name)

    # Running

    def wants_backward(self, *inputs: torch.Tensor) -> bool:
        """Whether this call needs a program with a backward pass."""
        return torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (*inputs, *self.parameters())
        )

    def execute(self, program: Program, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run `program` on `inputs` and this module's parameters, calibrating first if that is due."""
        rehearsed = rehearsal.active()
        if rehearsed is not None:
            return rehearsed.run(self, program, {**dict(self.named_parameters()), **inputs})
        calibrating = self.quant.quantized and (self.calibration_due() if self.training else not self.calibrated)
        if self.quant.quantized and self.training:
            self.limit_clip_steps()
            if self.weights_due():
                self._measure_weights()
                self._weights_measured_at = int(self.passes)
        tensors = {**dict(self.named_parameters()), **inputs, "random_key": draw_key()}
        if not program.output_gradients:
            tensors.update(self._weight_codes())
        measuring = calibrating and self.quant.activation_init != "fixed"
        hooks = Hooks(
            before=self._calibrate_operation if measuring else None,
            after=self._observer,
        )
        memory = self.step_memory if self.training else None
        outputs = Execution(program, hooks, memory=memory, owner=self)(tensors)
        if calibrating:
            for module in self.modules():
                if isinstance(module, ProgramModule):
                    module.calibrated.fill_(True)
            self._measured_at = int(self.passes)
            self._forget_clips()
        if self.quant.quantized and self.training and program.output_gradients:
            self._remember_clips()
            self.passes += 1
        return outputs

    @torch.no_grad()
    def limit_clip_steps(self) -> None:
        """Bring every clip back to within `clip_step`, relatively, of where the last training pass saw it. NaN stays.

        An optimizer such as Adam takes steps about as long as its learning rate, whatever it steps on: several percent
        of a small clip each time, in a random direction, and across zero sooner or later. Where a clip was is
        remembered on the parameter itself, and forgotten when it is measured or loaded.
        """
        step = self.quant.clip_step
        for clip in self._clips().values():
            before = getattr(clip, _BEFORE, None)
            if before is not None:
                torch.clamp(clip.data, before * (1 - step), before * (1 + step), out=clip.data)

    def _remember_clips(self) -> None:
        for clip in self._clips().values():
            setattr(clip, _BEFORE, clip.detach().clone())

    def _forget_clips(self) -> None:
        for clip in self._clips().values():
            setattr(clip, _BEFORE, None)

    def calibration_due(self) -> bool:
        """Whether the next training pass measures the clips: the first one does, then 2, 4, 8, ..."""
        if not self.quant.quantized:
            return False
        passes = int(self.passes)
        again = passes in _CALIBRATED_AT and passes <= self.quant.calibration_passes and self._measured_at != passes
        return not self.calibrated or again

    def weights_due(self) -> bool:
        """Whether the next training pass measures the clips of weights: passes 2, 3, 4, ..., each time 9 % later."""
        passes = int(self.passes)
        return (
            self.quant.weight_init != "fixed"
            and passes in _WEIGHTS_CALIBRATED_AT
            and passes <= self.quant.calibration_passes
            and self._weights_measured_at != passes
        )

    def _calibrate_operation(self, operation, values) -> None:
        """Before an operation rounds an activation: measure the clip that it will round under."""
        if operation.definition.unquantized is None:
            return
        clip = next((t for t in operation.inputs if t is not None and t.name.endswith(CLIP)), None)
        if clip is None:
            return
        inputs = [None if tensor is None else values[tensor] for tensor in operation.inputs]
        with naming(clip.name.removesuffix(CLIP)):
            measured = calibrate(
                operation.definition.unquantized(*inputs, **operation.attributes), self.quant.activation_init,
                self.quant.bits, fixed=self.quant.activation_clip, percentile=self.quant.percentile,
            )
        values[clip].data.copy_(measured)

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
        self.limit_clip_steps()
        return super().train(mode)

    def _apply(self, *arguments, **options):
        self._codes.clear()
        return super()._apply(*arguments, **options)

    def _save_to_state_dict(self, *arguments, **options):
        self.limit_clip_steps()
        super()._save_to_state_dict(*arguments, **options)

    def _load_from_state_dict(self, *arguments, **options):
        self._codes.clear()
        self._forget_clips()
        super()._load_from_state_dict(*arguments, **options)


@contextlib.contextmanager
def naming(tensor: str) -> Iterator[None]:
    """Within this context a ValueError begins with the name of the tensor that it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{tensor}: {error}") from error


def initialise_uniform(parameter: torch.Tensor, fan_in: int) -> None:
    """Uniform in ±1/sqrt(fan_in), as torch.nn.Linear draws both weights and biases."""
    bound = 1.0 / math.sqrt(fan_in)
    nn.init.uniform_(parameter, -bound, bound)


def rows_of(x: torch.Tensor, width: int) -> torch.Tensor:
    """x [..., width] as rows [M, width].

    Raises:
        ValueError: another width, or nothing in it.
    """
    if x.dim() == 0 or x.shape[-1] != width or x.numel() == 0:
        raise ValueError(f"the input is {tuple(x.shape)}; it must be [..., {width}] and not empty")
    return x.reshape(-1, width)


def time_and_batch(x: torch.Tensor, width: int) -> tuple[int, int]:
    """(T, B) of x [T, B, width].

    Raises:
        ValueError: another shape, no sentence, or no word.
    """
    if x.dim() != 3 or x.shape[2] != width or x.numel() == 0:
        raise ValueError(
            f"the input is {tuple(x.shape)}; it must be [time, sentences, {width}] with at least one word"
        )
    return x.shape[0], x.shape[1]


def key_padding(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A padding mask bool [B, S], or None where it masks nothing."""
    return None if mask is None or not mask.any() else mask.to(torch.bool)
