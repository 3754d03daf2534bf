"""Modules that run programs: a pass is prepared, run and settled."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace

from lsq import quant
from lsq.config import QuantConfig
from lsq.layers import clip_format
from lsq.layers.builder import Mode, in_floats
from lsq.layers.clips import ClippedModule
from lsq.layers.model_formats import tensor_names
from lsq.layers.repeated import RepeatedPass
from lsq.layers.schedule import recomputing
from lsq.ops.calibration import Calibration
from lsq.program.operation import Operation
from lsq.program.program import Program
from lsq.program.values import SEEN
from lsq.quant.random import draw_key, key_of
from lsq.run import shards
from lsq.run.backends import Backend, backend, for_device
from lsq.run.executor import NO_HOOKS, Execution, Hooks
from lsq.run.frames import active_rehearsal
from lsq.run.parameter_state import steps

if TYPE_CHECKING:
    from lsq.run.planned import StepMemory

Watcher = Callable[["ProgramModule", Program, dict[str, Tensor], tuple[Tensor, ...]], None]
"""Sees every pass in training mode: module, program, inputs and parameters by name, results."""
REASON = (
    "a layer of lsq is a program of fused operations already and runs beside the compiled graph; "
    "compile without fullgraph=True"
)
_MODES = torch._C._TorchDispatchModeKey


@dataclass(kw_only=True, eq=False)
class Pass:
    """One pass of a module."""

    program: Program
    parameters: dict[str, Tensor]
    backend: Backend
    again: bool
    """Whether gradient checkpointing runs it again."""
    trained: bool
    """Whether it has a backward pass."""
    calibrates: bool
    """Whether it measures the clips of activations."""
    weights_due: bool
    """Whether the clips of all weights are measured before it."""
    calibration: Calibration


class ProgramModule(ClippedModule):
    """A module that computes by running a program, and holds the parameters of the program.

    Attributes:
        backend: runs its programs; None: the backend of its parameters' device.
        step_memory: the planned memory of its training passes (`lsq.plan_memory`); None: no plan.
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
    takes_float_states = False
    """Whether a state dict without clips is complete: the next pass measures them."""

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
        """Make the parameters of the program that `build` returns; `measure` clips of weights."""
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
        """Return how a program of this module now runs on these inputs."""
        return Mode(
            training=self.training, backward=self.wants_backward(*inputs), backend=self.target
        )

    @property
    def target(self) -> Backend:
        """The backend of the next pass."""
        return self.backend or for_device(self.first_parameter().device)

    # One pass

    def execute(self, program: Program, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Run `program` on inputs and the module's parameters; ValueError if devices differ."""
        self._check_devices(inputs)
        if self.schedule.float_fallback:
            program = in_floats(program)
        rehearsed = active_rehearsal.get()
        if rehearsed is not None:
            return rehearsed.run(self, program, {**self._parameters_of(program), **inputs})
        kept = self.weight_state.repeated(self, program) if self._may_repeat() else None
        if kept is not None:
            return kept(inputs)
        run = self._prepare(program)
        tensors = self._tensors_of(run, inputs)
        execution = self._execution(run, tensors)
        outputs = self._settle(run, tensors, execution(tensors))
        if self._may_repeat() and not (run.trained or run.calibrates or run.weights_due):
            self.weight_state.keep(program, lambda: RepeatedPass.of(self, execution, tensors))
        return outputs

    def _may_repeat(self) -> bool:
        """Whether a pass now measures and notes nothing."""
        schedule = self.schedule
        return not (
            self.training
            or self._observer is not None
            or self.weight_masks is not None
            or schedule.float_fallback
            or schedule.activations_due(training=False)
            or schedule.weights_due(training=False)
        )

    def _prepare(self, program: Program) -> Pass:
        """Limit clips after the last step, and measure the clips of weights that are due."""
        schedule, again, trained = self.schedule, recomputing(), bool(program.output_gradients)
        calibrates = schedule.activations_due(self.training, again, trained=trained)
        may_train = self.training and (not self.quant.learned or self.trained())
        weights_due = schedule.weights_due(may_train, again)
        if self.measured.sharded:
            self.measured.begin_pass(self.clips())
        if not schedule.begun:
            self.allocate_clips()
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
        replaced = self._fit_clips(program, parameters)
        outdated = self.weight_state.drop_outdated(self, program)
        if self.quant.learned and self.quant.clip_init != "fixed" and schedule.begun:
            replaced += outdated  # absmax clips are measured when codes are made
        if calibrates and not schedule.calibrated:
            self.measured.measures_first(self.clips())
        if weights_due or replaced:
            self._measure_weights(
                run.calibration, again=schedule.begun, anew=replaced, all=weights_due
            )
        return run

    def _tensors_of(self, run: Pass, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
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
        measures = run.calibrates and self.quant.clip_init != "fixed"
        hooks = NO_HOOKS
        if measures or self._observer is not None:
            before = partial(self._calibrate_operation, run.calibration) if measures else None
            hooks = Hooks(before=before, after=self._observer)
        if self._observer is not None and run.trained:
            self._observer.weights(self, {**tensors, **run.parameters})
        # the backward pass needs copies: FSDP2 gathers clips anew, and a next pass may measure them
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
        """Note that the pass has run, and what it has measured."""
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
        """Go on in floats: this module rounds nothing from now on, and keeps its clips."""
        self.schedule.float_fallback = True
        self._drop_codes()

    def reached(self, nothing: Tensor, *inputs: Tensor) -> Tensor:
        """Return an empty result, linked to all parameters: DDP awaits a gradient of each."""
        return nothing + sum(one.sum() for one in (*self.parameters(), *inputs)).to(nothing.dtype)

    def calibration_due(self) -> bool:
        """Whether the next training pass measures the clips of activations."""
        return self.schedule.activations_due(training=True)

    def _check_devices(self, inputs: dict[str, Tensor]) -> None:
        device = self.first_parameter().device
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
                    f"parameters of this {type(self).__name__} are shards of FSDP2 or of"
                    " parallelize_module, of which nothing can be computed; call fully_shard on it,"
                    " or on a module around it, and call that, or let parallelize_module split"
                    " linear layers alone, after lsq.convert(model, fused=False)"
                )
        if self.weight_masks is None:
            return own
        if self.training and program.output_gradients:
            self.weight_masks.warn_alone()
        return {name: self.values_of(name) for name in own}

    def _random_key(self, program: Program, inputs: dict[str, Tensor], target: Backend) -> Tensor:
        """Return the key of a pass's random numbers, int64 [1].

        Every pass in training mode draws one, needed or not: reentrant checkpointing runs without
        gradients first, then with them from the same generator state, and both must draw alike.
        """
        if self.training:
            (key,) = target.send([draw_key()])
            return key
        if not program.draws:
            return torch.zeros(1, dtype=torch.int64, device=target.device)
        trained = [one for one in self.every_parameter() if one.requires_grad]
        largest = sorted(trained, key=Tensor.numel)[-1:]
        return key_of(next(iter(inputs.values())), *largest)  # weights change it in each update

    def _calibrate_operation(
        self, calibration: Calibration, declared: Operation, operation: Operation
    ) -> None:
        """Measure the clip with which an operation is about to round an activation."""
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
            self.quant.activation_form(name),
            into=rounding.clip,
            widens=widens,
            again=widens,
        )
        rounding.started = False  # the scale written so far is of the old clip

    # State

    def __prepare_scriptable__(self):
        """Refuse torch.jit.script, which calls this method of each module."""
        raise RuntimeError(refusal("torch.jit.script"))

    def __getstate__(self):
        return {**super().__getstate__(), "_watcher": None}  # a copy is not watched

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        self._settle_clips()
        self.bring_clips_up()
        # not super(): the Linear of PyTorch Geometric saves its weight and bias alone
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        if self.quant.quantized:
            self.schedule.save(destination, prefix)
            clip_format.save(destination, prefix, self.quant)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, *lists):
        """Load as nn.Module does; raises ValueError for a damaged clip, or another format."""
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
        self.allocate_clips()


def _records(program: Program) -> tuple[tuple[str, str], ...]:
    """Return (input that records a magnitude, its clip) pairs of a program, looked up once."""
    found = program.prepared.get("records")
    if found is None:
        names = [one.name for one in program.inputs if one.name.endswith(SEEN)]
        found = tuple((name, name.removesuffix(SEEN)) for name in names)
        program.prepared["records"] = found
    return found


def rows_of(x: Tensor, width: int) -> Tensor:
    """Return x [..., width] as rows [M, width]; ValueError if it is empty or of another width."""
    if x.dim() == 0 or x.shape[-1] != width or x.numel() == 0:
        raise ValueError(f"the input is {tuple(x.shape)}; it must be [..., {width}] and not empty")
    # x itself if possible, so that planned memory recognises it
    return x if x.dim() == 2 else x.reshape(-1, width)


def check_words(kind: str, words: Tensor, vocabulary: int) -> None:
    """Raise a ValueError for words outside a vocabulary; on a GPU kernels return NaN instead."""
    if words.device.type == "cpu":
        low, high = map(int, torch.aminmax(words))
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"{kind} lie between {low} and {high}; the vocabulary has {vocabulary} words"
            )


def held(y: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """Return y linked to `parameters`, without gradients for them: DDP waits for each."""
    return _Held.apply(y, *parameters)


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, *parameters):
        ctx.count = len(parameters)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, *(None,) * ctx.count


# torch.compile, and other transforms that trace modules


def beside_the_graph(method: Callable) -> Callable:
    """Let torch.compile call a method outside of its graph; refuse other transforms of PyTorch.

    This does what `torch.compiler.disable` does, without importing torch._dynamo for seconds.
    """

    @wraps(method)
    def checked(*arguments, **options):
        looker = looking_in()
        if looker is not None:
            raise RuntimeError(refusal(looker))
        return method(*arguments, **options)

    beside = torch._disable_dynamo(checked)
    beside._torchdynamo_disable, beside._torchdynamo_disable_msg = True, REASON  # shown to users
    return beside


def looking_in() -> str | None:
    """Return the name of an active transform of PyTorch that cannot trace programs, or None."""
    if torch._C._are_functorch_transforms_active():
        return "torch.func"
    if torch._C._get_tracing_state():
        return "torch.jit.trace"
    if torch.compiler.is_exporting():
        return "torch.export"
    if _symbolic_trace._is_fx_tracing_flag or torch._C._get_dispatch_mode(_MODES.PROXY):
        return "torch.fx"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    return "FakeTensorMode" if torch._C._get_dispatch_mode(_MODES.FAKE) else None


def refusal(name: str) -> str:
    """Return the error message for users of the transform `name`."""
    return (
        f"{name} cannot look into layers of lsq, which run as whole programs: lsq.revert(model)"
        " makes plain PyTorch of a converted model, and skip= of lsq.convert leaves layers as they"
        " are"
    )
