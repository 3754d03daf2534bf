"""Modules that run programs: a pass is prepared, run and settled."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lsq import quant
from lsq.config import QuantConfig
from lsq.layers import clip_format
from lsq.layers.clips import ClippedModule
from lsq.layers.float_fallback import held, in_floats
from lsq.layers.programs import Mode
from lsq.layers.schedule import recomputing
from lsq.layers.tensor_names import tensor_names
from lsq.layers.torch_compile import refusal
from lsq.layers.weight_state import rounded_weights
from lsq.ops.calibration import Calibration
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.values import SEEN
from lsq.quant.random import draw_key, key_of
from lsq.run import parameter_state, shards
from lsq.run.backends import Backend, backend, for_device
from lsq.run.executor import NO_HOOKS, Execution, Hooks, active_rehearsal
from lsq.run.parameter_state import steps

if TYPE_CHECKING:
    from lsq.run.planned import StepMemory

Watcher = Callable[["ProgramModule", Program, dict[str, Tensor], tuple[Tensor, ...]], None]
"""Sees every pass in training mode: module, program, inputs and parameters by name, results; see
lsq.observe."""


@dataclass(kw_only=True, eq=False)
class Pass:
    """One pass of a module."""

    program: Program
    parameters: dict[str, Tensor]
    backend: Backend
    again: bool
    """Whether gradient checkpointing runs it again."""
    trained: bool
    """Whether it goes back."""
    calibrates: bool
    """Whether it measures the clips of activations."""
    weights_due: bool
    """Whether the clips of all weights are measured before it."""
    calibration: Calibration


class ProgramModule(ClippedModule):
    """A module that computes by running a program, and has the parameters that the program
    declares.

    Attributes:
        backend: where it runs; None: where its parameters are.
        step_memory: where the tensors of its training passes lie, if that was planned (see
            `lsq.layers.memory`).
    """

    STATE = (
        "quant",
        "declared",
        "tensor_names",
        "weight_state",
        "schedule",
        "followed",
        "measured",
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

    def wants_backward(self, *inputs: Tensor) -> bool:
        """Whether this call needs a program with a backward pass."""
        if not torch.is_grad_enabled():
            return False
        return any([one.requires_grad for one in inputs]) or self.trained()

    def mode(self, *inputs: Tensor) -> Mode:
        """Return how a program of this module runs on these inputs now."""
        return Mode(
            training=self.training, backward=self.wants_backward(*inputs), backend=self.target
        )

    @property
    def target(self) -> Backend:
        """The backend of the next pass."""
        return self.backend or for_device(self.every_parameter()[0].device)

    # One pass

    def execute(self, program: Program, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Run `program` on `inputs` and this module's parameters, calibrating first if that is due.

        Raises:
            ValueError: an input is on another device than the parameters.
        """
        self._check_devices(inputs)
        if self.schedule.float_fallback:
            program = in_floats(program)
        rehearsed = active_rehearsal.get()
        if rehearsed is not None:
            return rehearsed.run(self, program, {**self._parameters_of(program), **inputs})
        run = self._prepare(program)
        tensors = self._tensors_of(run, inputs)
        outputs = self._execution(run, tensors)(tensors)
        return self._settle(run, tensors, outputs)

    def _prepare(self, program: Program) -> Pass:
        """Bring clips to what the last step left, and measure those of weights that are due."""
        schedule, again, trained = self.schedule, recomputing(), bool(program.output_gradients)
        calibrates = schedule.activations_due(self.training, again, trained=trained)
        may_train = self.training and (not self.quant.learned or self.trained())
        weights_due = schedule.weights_due(may_train, again)
        if self.measured.sharded:
            self.measured.begin_pass(self.clips())
        if not schedule.begun:
            self._allocate_clips()
        if self.training:
            self.limit_clip_steps()
        parameters, target = self._parameters_of(program), self.target
        run = Pass(
            program=program,
            parameters=parameters,
            backend=target,
            again=again,
            trained=trained,
            calibrates=calibrates,
            weights_due=weights_due,
            calibration=Calibration(target),
        )
        replaced = self._fit_clips(program, parameters) + self._drop_outdated(program)
        if calibrates and not schedule.calibrated:
            self.measured.measures_first(self.clips())
        if weights_due or replaced:
            self._measure_weights(
                run.calibration, again=schedule.begun, anew=replaced, all=weights_due
            )
        return run

    def _tensors_of(self, run: Pass, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gather all that the program reads, by name: parameters, inputs, codes of weights, memory
        for magnitudes."""
        key = self._random_key(run.program, inputs, run.backend)
        codes = self.weight_state.codes(self, run.program, run.parameters, run.backend)
        tensors = {**run.parameters, **inputs, "random_key": key, **codes}
        if self.quant.quantized and not self.quant.learned:
            if self.training and not run.again:
                self.follow_clips()
            records, clips = _records(run.program), {}
            if not self.followed.recorded:
                clips = self.activation_clips()
            tensors |= self.followed.memory(records, clips, counts=self.training)
        return tensors

    def _execution(self, run: Pass, tensors: dict[str, Tensor]) -> Execution:
        """Make the execution of the program."""
        measures = run.calibrates and self.quant.clip_init != "fixed"
        hooks = NO_HOOKS
        if measures or self._observer is not None:
            before = partial(self._calibrate_operation, run.calibration) if measures else None
            hooks = Hooks(before=before, after=self._observer)
        if self._observer is not None and run.trained:
            self._observer.weights(self, {**tensors, **run.parameters})
        # FSDP2 gathers clips anew to go back; the next use in this step may measure as well
        fleeting = {*run.calibration.written, *self.measured.unsettled()}
        return Execution(
            run.program,
            run.backend,
            hooks=hooks,
            memory=self.step_memory if self.training else None,
            owner=self,
            fleeting=fleeting | set(self.clips()) if measures else fleeting,
        )

    def _settle(
        self, run: Pass, tensors: dict[str, Tensor], outputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Note what the pass has measured and that it was made."""
        every = self.measured.sharded and not self.quant.learned
        self.measured.note(self.clips() if every else run.calibration.written)
        run.calibration.finish()
        if run.weights_due:
            self.schedule.measured_weights()
        if run.calibrates:
            self.schedule.measured_activations(trained=run.trained)
            self._forget_clips()
        if self.quant.quantized and self.training:
            steps.watch()
            if run.trained:
                self._remember_clips()
            self.schedule.count(run.again, trained=run.trained)
        if self._watcher is not None and self.training:
            self._watcher(self, run.program, {**tensors, **run.parameters}, outputs)
        if self.schedule.float_fallback and run.trained:
            outputs = held(outputs[0], self.clips().values()), *outputs[1:]
        return outputs

    def fall_back(self) -> None:
        """Go on in floats: from now on nothing of this module is rounded.

        Its clips stay, and do not change.
        """
        self.schedule.float_fallback = True
        self._drop_codes()

    def reached(self, nothing: Tensor, *inputs: Tensor) -> Tensor:
        """A result without a value, [..., 0, ...], that depends on all parameters and `inputs`.

        Their gradients are zeros then, for which DistributedDataParallel waits.
        """
        return nothing + sum(one.sum() for one in (*self.parameters(), *inputs)).to(nothing.dtype)

    def calibration_due(self) -> bool:
        """Whether the next training pass measures the clips of activations."""
        return self.schedule.activations_due(training=True)

    def _check_devices(self, inputs: dict[str, Tensor]) -> None:
        """Refuse inputs that are elsewhere; nothing is copied behind anyone's back."""
        device = self.every_parameter()[0].device
        for name, tensor in inputs.items():
            if tensor.device != device:
                raise ValueError(
                    f"{name} is on {tensor.device}, but the parameters of this"
                    f" {type(self).__name__} are on {device}; move one of the two with .to()"
                )

    def _parameters_of(self, program: Program) -> dict[str, Tensor]:
        own = {}
        for virtual in program.parameters:
            tensor = own[virtual.name] = self.own_parameter(virtual.name)
            if type(tensor) is not nn.Parameter and shards.is_shard(tensor):
                raise ValueError(
                    f"parameters of this {type(self).__name__} are shards of FSDP2, of which"
                    " nothing can be computed; call fully_shard on it, or on a module around it,"
                    " and call that"
                )
        if self.weight_masks is None:
            return own
        if self.training and program.output_gradients:
            self.weight_masks.warn_alone()
        return {name: self.values_of(name) for name in own}

    def _drop_outdated(self, program: Program) -> list[str]:
        """Forget kept codes of weights that have changed; names of those whose clips are to be
        measured anew."""
        if not self.weight_state.stamped:
            return []
        rows = max((one.shape[0] for one in program.inputs if one.shape), default=1)
        clips = {one.name: self.own_parameter(one.clip) for one in rounded_weights(program)}
        replaced = self.weight_state.drop_outdated(self, clips, rows)
        # else whoever makes codes does
        measures = self.quant.learned and self.quant.clip_init != "fixed"
        return replaced if measures and self.schedule.begun else []

    def _random_key(self, program: Program, inputs: dict[str, Tensor], target: Backend) -> Tensor:
        """For what a pass does at random, int64 [1].

        Each pass in training mode draws it from PyTorch's generator, also one that needs none:
        reentrant checkpointing goes forward without gradients first, and rounds them in a second
        pass that draws from the same state again.
        """
        if self.training:
            (key,) = target.send([draw_key()])
            return key
        if not program.draws:
            return torch.zeros(1, dtype=torch.int64, device=target.device)
        trained = [one for one in self.every_parameter() if one.requires_grad]
        largest = sorted(trained, key=Tensor.numel)[-1:]
        return key_of(next(iter(inputs.values())), *largest)  # another one after each update

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
        """Refuse torch.jit.script, which asks each module what it should compile."""
        raise RuntimeError(refusal("torch.jit.script"))

    def __getstate__(self):
        return {**super().__getstate__(), "_watcher": None}  # who watches does not watch the copy

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        self.limit_clip_steps()
        self.bring_clips_up()
        parameter_state.limit_shards(self.measured.settle(self.clips()))
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
        clip_format.upgrade(state_dict, prefix, self.declared)
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
        self._allocate_clips()


def _records(program: Program) -> tuple[tuple[str, str], ...]:
    """(input where a magnitude is recorded, its clip) of a program, looked up once."""
    found = program.prepared.get("records")
    if found is None:
        names = [one.name for one in program.inputs if one.name.endswith(SEEN)]
        found = tuple((name, name.removesuffix(SEEN)) for name in names)
        program.prepared["records"] = found
    return found


def rows_of(x: Tensor, width: int) -> Tensor:
    """x [..., width] as rows [M, width].

    Raises:
        ValueError: another width, or nothing in it.
    """
    if x.dim() == 0 or x.shape[-1] != width or x.numel() == 0:
        raise ValueError(f"the input is {tuple(x.shape)}; it must be [..., {width}] and not empty")
    # as it is, so that planned memory knows it again
    return x if x.dim() == 2 else x.reshape(-1, width)
