"""What every module that runs a program shares: parameters with clips, calibration, cached codes of weights."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from lsq import quant
from lsq.backends import Backend, backend, for_device
from lsq.config import QuantConfig
from lsq.layers.devices import check_devices
from lsq.layers.programs import Mode
from lsq.layers.schedule import Schedule
from lsq.layers.upgrade import upgrade
from lsq.layers.weight_codes import WeightCodes
from lsq.ops.calibration import Calibration
from lsq.program import rehearsal, shards, upkeep
from lsq.program.executor import Execution, Hooks
from lsq.program.frames import StepMemory
from lsq.program.operation import Operation
from lsq.program.parameters import CLIPS, Parameter
from lsq.program.program import Program
from lsq.quant.random import draw_key


class ProgramModule(nn.Module):
    """A module that computes by running a program, and has the parameters that the program declares.

    A parameter "self_attn.out_weight" of the program is the attribute `out_weight` of a plain child module `self_attn`.

    `schedule` says when clips are measured: in the first training pass, and again while tensors still grow fast.
    `codes` are those of its weights.

    `step_memory` is where the tensors of its training passes lie, if that was planned (see `lsq.layers.memory`).
    `backend` is where it runs; None: where its parameters are.
    """

    def __init__(self, quantization: QuantConfig):
        super().__init__()
        self.quant = quantization
        self.declared: dict[str, Parameter] = {}
        self.backend: Backend | None = None
        self.codes = WeightCodes()
        self._observer = None
        self.step_memory: StepMemory | None = None
        self.schedule = Schedule(quantization)

    # Construction

    def declare(self, build: Callable[[Mode], Program]) -> None:
        """Make the parameters that a program declares, and measure the clips of weights.

        `build` is given how the program would be trained, and makes it for a batch of any size.
        """
        program = build(Mode(training=True, backward=True, backend=backend("reference")))
        for virtual in program.parameters:
            declared = virtual.declared
            holder, name = self._holder(declared.name)
            made = nn.Parameter(torch.empty(declared.shape))
            declared.initialise(made)
            holder.register_parameter(name, made)
            self.declared[declared.name] = declared
        self.calibrate_weights()

    def _holder(self, path: str) -> tuple[nn.Module, str]:
        """The module that holds the parameter of that dotted name, and its name there."""
        *parts, name = path.split(".")
        holder = self
        for part in parts:
            if part not in dict(holder.named_children()):
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        return holder, name

    def own_parameter(self, name: str) -> nn.Parameter:
        """What `get_parameter` finds, in a tenth of the time: every pass asks for all, several times."""
        module = self
        *path, last = name.split(".")
        for part in path:
            module = module._modules[part]
        return module._parameters[last]

    def calibrate_weights(self) -> None:
        """Measure the clip of every weight in this module, as `weight_init` says."""
        calibration = Calibration(self.target)
        self._measure_weights(calibration)
        torch.autograd.graph.increment_version(list(self.clips().values()))
        shards.measured(self, calibration.written)
        calibration.finish()

    def _measure_weights(self, calibration: Calibration) -> None:
        """The same, unseen by autograd: an earlier pass of this module may still await its backward pass."""
        for name, declared in self.declared.items():
            if declared.clip is not None:
                self._measure(
                    calibration, name, self.own_parameter(name), declared.clip, self.quant.weight_init,
                    self.quant.weights.bits, per_channel=self.quant.weight_granularity == "channel",
                    fixed=self.quant.weight_clip, percentile=self.quant.percentile,
                )
        self._drop_codes()
        self._forget_clips()

    def _measure(self, calibration: Calibration, name: str, x: torch.Tensor, clip: str, *how, **options) -> None:
        parameter = self.own_parameter(clip)
        calibration.measure(name, x, parameter.data, *how, **options)
        calibration.written[clip] = parameter

    def clips(self) -> dict[str, nn.Parameter]:
        """Every clip of this module by name."""
        return {name: self.own_parameter(name) for name, one in self.declared.items() if one.kind in CLIPS}

    # Running

    def wants_backward(self, *inputs: torch.Tensor) -> bool:
        """Whether this call needs a program with a backward pass."""
        return torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (*inputs, *self.parameters())
        )

    def mode(self, *inputs: torch.Tensor) -> Mode:
        """How a program of this module runs on these inputs now."""
        return Mode(training=self.training, backward=self.wants_backward(*inputs), backend=self.target)

    @property
    def target(self) -> Backend:
        """Where it runs."""
        return self.backend or for_device(next(self.parameters()).device)

    def execute(self, program: Program, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run `program` on `inputs` and this module's parameters, calibrating first if that is due.

        Raises:
            ValueError: an input is on another device than the parameters.
        """
        check_devices(self, inputs)
        rehearsed = rehearsal.active()
        if rehearsed is not None:
            return rehearsed.run(self, program, {**self._parameters_of(program), **inputs})
        calibrating, calibration = self.schedule.activations_due(self.training), Calibration(self.target)
        weights_due = self.training and self.schedule.weights_due()
        shards.begin_pass(self)
        if self.quant.quantized and self.training:
            self.limit_clip_steps()
        if weights_due:
            self._measure_weights(calibration)
        (key,) = self.target.send([draw_key()])
        parameters = self._parameters_of(program)
        codes = self.codes.of(program, parameters, self.target, every=self.parameters(), training=self.training)
        tensors = {**parameters, **inputs, "random_key": key, **codes}
        measuring = calibrating and self.quant.activation_init != "fixed"
        hooks = Hooks(
            before=partial(self._calibrate_operation, calibration) if measuring else None,
            after=self._observer,
        )
        if self._observer is not None and program.output_gradients:
            self._observer.weights(self, tensors)
        memory = self.step_memory if self.training else None
        outputs = Execution(program, self.target, hooks=hooks, memory=memory, owner=self)(tensors)
        shards.measured(self, calibration.written)
        calibration.finish()
        if weights_due:
            self.schedule.measured_weights()
        if calibrating:
            self.schedule.measured_activations()
            self._forget_clips()
        if self.quant.quantized and self.training and program.output_gradients:
            self._remember_clips()
            self.schedule.passes += 1
        return outputs

    def _parameters_of(self, program: Program) -> dict[str, torch.Tensor]:
        found = {virtual.name: self.own_parameter(virtual.name) for virtual in program.parameters}
        if any(map(shards.is_shard, found.values())):
            raise ValueError(
                f"parameters of this {type(self).__name__} are shards of FSDP2, of which nothing can be computed; call "
                "fully_shard on it, or on a module around it, and call that"
            )
        return found

    @torch.no_grad()
    def limit_clip_steps(self) -> None:
        """Bring every clip back to within `clip_step`, relatively, of where the last training pass saw it. NaN stays.

        An optimizer such as Adam takes steps about as long as its learning rate, whatever it steps on: several percent
        of a small clip each time, in a random direction, and across zero sooner or later. Where a clip was is
        forgotten when it is measured or loaded; lsq.optim.Adam limits its steps itself.
        """
        clips = {} if shards.sees_copies(self) else self.clips()
        limited = [(clip.data, upkeep.of(clip).before) for clip in clips.values()]
        clips = [clip for clip, before in limited if before is not None]
        if clips:
            before = [value for _, value in limited if value is not None]
            torch._foreach_maximum_(clips, torch._foreach_mul(before, 1 - self.quant.clip_step))
            torch._foreach_minimum_(clips, torch._foreach_mul(before, 1 + self.quant.clip_step))

    def _remember_clips(self) -> None:
        if not shards.pass_done(self, self.quant.clip_step):
            upkeep.remember(self.clips().values(), self.quant.clip_step)

    def _forget_clips(self) -> None:
        for clip in self.clips().values():
            upkeep.forget(clip)

    def calibration_due(self) -> bool:
        """Whether the next training pass measures the clips of activations."""
        return self.schedule.activations_due(training=True)

    def _calibrate_operation(self, calibration: Calibration, declared: Operation, operation: Operation) -> None:
        """Before an operation rounds an activation: measure the clip that it will round under."""
        rounding = operation.rounding()
        if rounding is None:
            return
        clip = declared.rounding().clip.name
        self._measure(
            calibration, clip.removesuffix("_clip"), operation.unrounded(self.target.run), clip,
            self.quant.activation_init, self.quant.bits, percentile=self.quant.percentile,
        )
        rounding.started = False  # the scale that was written is that of the clip before

    # Whatever may change weights drops the kept codes, and so does a copy

    def _drop_codes(self) -> None:
        self.codes.clear()
        for name, declared in self.declared.items():
            if declared.clip is not None:
                upkeep.withdraw(self.own_parameter(name))

    def __getstate__(self):
        self.limit_clip_steps()  # the copy does not know where clips were
        return {**self.__dict__}

    def train(self, mode: bool = True):
        if mode != self.training:
            self._drop_codes()
        self.limit_clip_steps()
        upkeep.limit_shards(shards.settle(self))
        return super().train(mode)

    def _apply(self, *arguments, **options):
        self._drop_codes()
        self.limit_clip_steps()
        self._forget_clips()  # they may move to another device
        shards.forget(self)
        return super()._apply(*arguments, **options)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        self.limit_clip_steps()
        upkeep.limit_shards(shards.settle(self))
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.quant.quantized:
            self.schedule.save(destination, prefix)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, *lists):
        """As nn.Module's; raises ValueError where a clip cannot be used, as a damaged checkpoint would bring it."""
        for name in self.clips():
            if prefix + name in state_dict:
                quant.check_clip(state_dict[prefix + name], prefix + name)
        self._drop_codes()
        self._forget_clips()
        shards.forget(self)
        upgrade(state_dict, prefix, self.declared)
        if self.quant.quantized:
            lacking = self.schedule.load(state_dict, prefix)
            missing += lacking if strict else []
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *lists)


def rows_of(x: torch.Tensor, width: int) -> torch.Tensor:
    """x [..., width] as rows [M, width].

    Raises:
        ValueError: another width, or nothing in it.
    """
    if x.dim() == 0 or x.shape[-1] != width or x.numel() == 0:
        raise ValueError(f"the input is {tuple(x.shape)}; it must be [..., {width}] and not empty")
    return x if x.dim() == 2 else x.reshape(-1, width)  # as it is, so that planned memory knows it again
