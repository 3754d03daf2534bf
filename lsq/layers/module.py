"""What every module that runs a program shares: parameters with clips, calibration, cached codes of
weights."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from lsq import quant
from lsq.config import QuantConfig
from lsq.layers import clip_format
from lsq.layers.clips import ClippedModule
from lsq.layers.devices import check_devices
from lsq.layers.programs import Mode
from lsq.layers.schedule import recomputing
from lsq.layers.tensor_names import tensor_names
from lsq.layers.torch_compile import refusal
from lsq.layers.upgrade import upgrade
from lsq.layers.variants import held, in_floats
from lsq.ops.calibration import Calibration
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.values import SEEN
from lsq.quant.random import draw_key, key_of
from lsq.run import rehearsal, shards, upkeep
from lsq.run.backends import Backend, backend, for_device
from lsq.run.executor import Execution, Hooks
from lsq.run.frames import StepMemory

Watcher = Callable[
    ["ProgramModule", Program, dict[str, torch.Tensor], tuple[torch.Tensor, ...]], None
]
"""Sees every pass in training mode: module, program, inputs and parameters by name, results; see
lsq.observe."""


class ProgramModule(ClippedModule):
    """A module that computes by running a program, and has the parameters that the program
    declares.

    `step_memory` is where the tensors of its training passes lie, if that was planned (see
    `lsq.layers.memory`). `backend` is where it runs; None: where its parameters are.
    """

    STATE = (
        "quant",
        "declared",
        "tensor_names",
        "codes",
        "schedule",
        "followed",
        "weight_masks",
        "backend",
        "_observer",
        "_watcher",
        "step_memory",
    )
    """Its attributes beside those of nn.Module."""
    takes_float_states = False
    """Whether a state dict without clips is complete: they are measured in the next pass."""

    def __init__(self, quantization: QuantConfig):
        nn.Module.__init__(self)
        self.begin(quantization)

    def begin(self, quantization: QuantConfig) -> None:
        super().begin(quantization)
        self.backend: Backend | None = None
        self._observer = None
        self._watcher: Watcher | None = None
        self.step_memory: StepMemory | None = None

    def declare(self, build: Callable[[Mode], Program], *, measure: bool = True) -> None:
        """Make the parameters that a program declares, and measure the clips of weights.

        `build` is given how the program would be trained, and makes it for a batch of any size.
        Without `measure` the first pass measures them.
        """
        program = build(Mode(training=True, backward=True, backend=backend("reference")))
        self.tensor_names = tensor_names(program, self.state_names)
        self.take_parameters(virtual.declared for virtual in program.parameters)
        self.add_masks()
        if measure:
            self.calibrate_weights()
        else:
            self.schedule.forget()

    # Running

    def wants_backward(self, *inputs: torch.Tensor) -> bool:
        """Whether this call needs a program with a backward pass."""
        return torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (*inputs, *self.every_parameter())
        )

    def mode(self, *inputs: torch.Tensor) -> Mode:
        """How a program of this module runs on these inputs now."""
        return Mode(
            training=self.training, backward=self.wants_backward(*inputs), backend=self.target
        )

    @property
    def target(self) -> Backend:
        """Where it runs."""
        return self.backend or for_device(self.every_parameter()[0].device)

    def execute(
        self, program: Program, inputs: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Run `program` on `inputs` and this module's parameters, calibrating first if that is due.

        Raises:
            ValueError: an input is on another device than the parameters.
        """
        check_devices(self, inputs)
        program = in_floats(program) if self.schedule.fallen else program
        rehearsed = rehearsal.active()
        if rehearsed is not None:
            return rehearsed.run(self, program, {**self._parameters_of(program), **inputs})
        target, trained = self.target, self.training and self.trained()
        again, calibration = recomputing(), Calibration(target)
        goes_back = bool(program.output_gradients)
        calibrating = self.schedule.activations_due(self.training, again, trained=goes_back)
        weights_due = self.schedule.weights_due(trained, again)
        shards.begin_pass(self)
        if not self.schedule.begun:
            self._place_clips()
        if self.training:
            self.limit_clip_steps()
        parameters = self._parameters_of(program)
        replaced = self._fit_clips(program, parameters) + self._check_codes(program)
        if calibrating and not self.schedule.calibrated:
            shards.measures_first(self)
        if weights_due or replaced:
            self._measure_weights(
                calibration, again=self.schedule.begun, anew=replaced, all=weights_due
            )
        key = self._random_key(program, inputs, target)
        codes = self.codes.of(
            program, parameters, target, changing=self._changes, sources=self.sources
        )
        tensors = {**parameters, **inputs, "random_key": key, **codes}
        if self.quant.quantized and not self.quant.learned:
            tensors |= self._follow_clips(program, again)
        measuring = calibrating and self.quant.clip_init != "fixed"
        hooks = Hooks(
            before=partial(self._calibrate_operation, calibration) if measuring else None,
            after=self._observer,
        )
        if self._observer is not None and program.output_gradients:
            self._observer.weights(self, {**tensors, **parameters})
        memory = self.step_memory if self.training else None
        # FSDP2 gathers clips anew to go back
        fleeting = {
            *calibration.written,
            *shards.unsettled(self),
        }
        # the next use in this step may measure as well
        fleeting |= set(self.clips()) if measuring else set()
        outputs = Execution(
            program, target, hooks=hooks, memory=memory, owner=self, fleeting=fleeting
        )(tensors)
        every = shards.sees_copies(self) and not self.quant.learned
        shards.measured(self, self.clips() if every else calibration.written)
        calibration.finish()
        if weights_due:
            self.schedule.measured_weights()
        if calibrating:
            self.schedule.measured_activations(trained=goes_back)
            self._forget_clips()
        if self.quant.quantized and self.training:
            if program.output_gradients:
                self._remember_clips()
            self.schedule.count(again, trained=goes_back)
        if self._watcher is not None and self.training:
            self._watcher(self, program, {**tensors, **parameters}, outputs)
        if self.schedule.fallen and program.output_gradients:
            outputs = held(outputs[0], self.clips().values()), *outputs[1:]
        return outputs

    def fall_back(self) -> None:
        """Go on in floats: from now on nothing of this module is rounded.

        Its clips stay, and do not change.
        """
        self.schedule.fallen = True
        self._drop_codes()

    def trained(self) -> bool:
        """Whether any of its parameters is; else codes of weights are kept in training mode,
        too."""
        return any(parameter.requires_grad for parameter in self.every_parameter())

    def reached(self, nothing: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """A result without a value, [..., 0, ...], that depends on all parameters and `inputs`.

        Their gradients are zeros then, for which DistributedDataParallel waits.
        """
        return nothing + sum(one.sum() for one in (*self.parameters(), *inputs)).to(nothing.dtype)

    def _parameters_of(self, program: Program) -> dict[str, torch.Tensor]:
        own = [self.own_parameter(virtual.name) for virtual in program.parameters]
        if any(map(shards.is_shard, own)):
            raise ValueError(
                f"parameters of this {type(self).__name__} are shards of FSDP2, of which nothing"
                " can be computed; call "
                "fully_shard on it, or on a module around it, and call that"
            )
        if self.weight_masks is None:
            return {virtual.name: one for virtual, one in zip(program.parameters, own, strict=True)}
        if self.training and program.output_gradients:
            self.weight_masks.warn_alone()
        return {virtual.name: self.values_of(virtual.name) for virtual in program.parameters}

    def _random_key(
        self, program: Program, inputs: dict[str, torch.Tensor], target: Backend
    ) -> torch.Tensor:
        """For what a pass does at random, int64 [1].

        Each pass in training mode draws it from PyTorch's generator, also one that needs none:
        reentrant checkpointing goes forward without gradients first, and rounds them in a second
        pass that draws from the same state again.
        """
        if self.training:
            (key,) = target.send([draw_key()])
            return key
        if not program.draws:
            return torch.zeros(1, dtype=torch.int64, device=target.place)
        trained = sorted(
            (one for one in self.every_parameter() if one.requires_grad), key=torch.Tensor.numel
        )
        return key_of(next(iter(inputs.values())), *trained[-1:])  # another one after each update

    def _changes(self, weight: str, clip: torch.Tensor) -> bool:
        """Whether training changes a weight or its clip, so that each pass makes its codes anew."""
        return self.training and any(one.requires_grad for one in (clip, *self.sources(weight)))

    def _check_codes(self, program: Program) -> list[str]:
        """Forget kept codes of weights that have changed; names of those that got other values
        without a clip.

        So does who loads weights by `copy_`. Clips that an optimizer or a user has frozen beside
        weights stay.
        """
        rows, replaced = max((one.shape[0] for one in program.inputs if one.shape), default=1), []
        for virtual in program.weights.values():
            if virtual.written:
                name, clip = virtual.values.name, self.own_parameter(virtual.clip.name)
                if self._changes(name, clip):
                    continue
                parts = self.sources(name)
                written = self.codes.check(name, parts, clip, rows)
                if written and (
                    clip.requires_grad or not any(part.requires_grad for part in parts)
                ):
                    replaced.append(name)
        # else whoever makes codes does
        measures = self.quant.learned and self.quant.clip_init != "fixed"
        return replaced if measures and self.schedule.begun else []

    def _follow_clips(self, program: Program, again: bool) -> dict[str, torch.Tensor]:
        """Let the clips of activations follow the passes before, and say where this one records
        what it rounds.

        Args:
            program: about to run.
            again: gradient checkpointing runs the pass again, which rounds under the clips of the
                first time.
        """
        if self.training and not again:
            self.follow_clips()
        self.followed.begin(self.activation_clips())
        return {
            one.name: self.followed.place(one.name.removesuffix(SEEN), self.training)
            for one in program.inputs
            if one.name.endswith(SEEN)
        }

    def calibration_due(self) -> bool:
        """Whether the next training pass measures the clips of activations."""
        return self.schedule.activations_due(training=True)

    def _calibrate_operation(
        self, calibration: Calibration, declared: Operation, operation: Operation
    ) -> None:
        """Before an operation rounds an activation: measure the clip that it will round under."""
        rounding = operation.rounding()
        if rounding is None:
            return
        clip = declared.rounding().clip.name
        name, widens = clip.removesuffix("_clip"), self.schedule.widens
        self._measure(
            calibration,
            name,
            operation.unrounded(self.target.run),
            clip,
            self.quant.clip_init if self.quant.learned else "absmax",
            self.quant.activation_form(name),
            percentile=self.quant.percentile,
            into=rounding.clip,
            widens=widens,
            again=widens,
        )
        rounding.started = False  # the scale that was written is that of the clip before

    # State

    def __prepare_scriptable__(self):
        """Where torch.jit.script asks each module what it should compile."""
        raise RuntimeError(refusal("torch.jit.script"))

    def __getstate__(self):
        return {**super().__getstate__(), "_watcher": None}  # who watches does not watch the copy

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        self.limit_clip_steps()
        self.bring_clips_up()
        upkeep.limit_shards(shards.settle(self))
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.quant.quantized:
            self.schedule.save(destination, prefix)
            clip_format.save(destination, prefix, self.quant)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, *lists):
        """As nn.Module's; raises ValueError where a clip cannot be used, as a damaged checkpoint
        would bring it, or has another format.
        """
        if self.quant.quantized:
            clip_format.load(state_dict, prefix, self.quant)
        clips = [prefix + self.state_name(name) for name in self.clips()]
        for name in clips:
            if name in state_dict:
                quant.check_clip(shards.local(state_dict[name]), name)
        self._let_go()
        upgrade(state_dict, prefix, self.declared)
        if self.weight_masks is not None:
            self.weight_masks.load(self, state_dict, prefix)
        lacking = self.schedule.load(state_dict, prefix) if self.quant.quantized else []
        found: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, found, *lists)
        own = {*lacking, *clips}
        if self.takes_float_states and own <= {*lacking, *found}:
            self.schedule.forget()
            lacking, found = [], [name for name in found if name not in own]
        missing += (lacking if strict else []) + found
        self._place_clips()


def rows_of(x: torch.Tensor, width: int) -> torch.Tensor:
    """x [..., width] as rows [M, width].

    Raises:
        ValueError: another width, or nothing in it.
    """
    if x.dim() == 0 or x.shape[-1] != width or x.numel() == 0:
        raise ValueError(f"the input is {tuple(x.shape)}; it must be [..., {width}] and not empty")
    # as it is, so that planned memory knows it again
    return x if x.dim() == 2 else x.reshape(-1, width)
