"""Modules that hold the parameters of a program, and measure and limit its clips."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from lsq.config import QuantConfig
from lsq.layers import clip_format
from lsq.layers.coded_weight import CodedWeight
from lsq.layers.schedule import Schedule
from lsq.layers.weight_state import WeightState
from lsq.ops.calibration import Calibration
from lsq.program.program import Program
from lsq.program.tensor import CLIPS, Kind, Parameter
from lsq.quant import SMALLEST_CLIP
from lsq.run import parameter_state
from lsq.run.parameter_state import steps
from lsq.run.shards import MeasuredClips, is_shard

KEPT = 63 / 64
"""Factor of a followed clip after an optimizer step, unless a larger magnitude was recorded."""
APART = 4
"""Stride of recorded magnitudes in floats: kernels take addresses that are multiples of 16."""


class FollowedClips:
    """Clips that follow the largest magnitudes of training passes (QuantConfig.clips="absmax").

    Operations record the largest magnitude (Coded.seen). Before the next pass each clip becomes the
    larger of it and of the old clip, less a 64th after an optimizer step. Magnitudes are kept until
    a step, so that taking a state dict before it changes nothing. Values that are not finite do not
    count. Python never waits for a device.
    """

    def __init__(self):
        self._seen: torch.Tensor | None = None
        """[2, clips, APART], row 0 of training passes since a step, row 1 of all other passes."""
        self._rows: dict[str, int] = {}
        self._step = steps.count

    def __reduce__(self):
        return FollowedClips, ()

    @property
    def recorded(self) -> bool:
        """Whether magnitudes may have been recorded."""
        return self._seen is not None

    def forget(self) -> None:
        """Drop the recorded magnitudes, since clips were set by other means."""
        self._seen = None

    def follow(self, clips: Mapping[str, torch.Tensor]) -> None:
        """Update clips, float32 [1] each, from the recorded magnitudes."""
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
        """Return float32 [1] to record a magnitude in, by name, for each (name, clip)."""
        if self._seen is None:
            self._rows = {name: row for row, name in enumerate(clips)}
            device = next((clip.device for clip in clips.values()), None)
            with torch.inference_mode(False):  # training may come next
                self._seen = torch.zeros(2, len(clips), APART, dtype=torch.float32, device=device)
        record = self._seen.data[0 if counts else 1, :, :1]  # .data: no backward pass reads it
        return {name: record[self._rows[clip]] for name, clip in wanted}


def _agree(optimizer: Optimizer) -> None:
    """Let all processes agree on clips before a step."""
    if (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    ):
        from lsq.dist import replicas  # late, since a single process does not need it

        replicas.agree(optimizer)


class ClippedModule(nn.Module):
    """A module that holds the parameters that a program declares.

    A parameter "self_attn.out_weight" is the attribute `out_weight` of a plain child `self_attn`.
    Clips stay float32 when the module is converted to another dtype.
    """

    def begin(self, quantization: QuantConfig) -> None:
        """Set the attributes that are not parameters."""
        self.quant = quantization
        self.declared: dict[str, Parameter] = {}
        self.weight_state = WeightState()
        self.schedule = Schedule(quantization)
        self.followed = FollowedClips()
        self.measured = MeasuredClips()
        self.weight_masks = None
        steps.know(self, _agree)

    # Parameters

    def take_parameters(self, every: Iterable[Parameter]) -> None:
        """Make the parameters that a program declares, unless they exist already."""
        device = next((one.device for one in self.parameters()), None)
        for declared in every:
            holder, name = self._holder(declared.name)
            self.declared[declared.name] = declared
            if getattr(holder, name, None) is None:
                learns = declared.kind not in CLIPS or self.quant.learned
                holder.register_parameter(name, _made(declared, device, learns))

    def _holder(self, path: str) -> tuple[nn.Module, str]:
        """Return the module that holds the parameter at `path`, and its name in that module."""
        *parts, name = path.split(".")
        holder = self
        for part in parts:
            if holder._modules.get(part) is None:  # named_children() yields a shared module once
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        return holder, name

    def state_name(self, name: str) -> str:
        """Return the name of a declared parameter in this module's state dict."""
        return name

    def state_names(self, name: str) -> Sequence[str]:
        """Return a parameter's names in the state dict: several if it joins several there."""
        return [self.state_name(name)]

    def own_parameter(self, name: str) -> nn.Parameter:
        """Return a parameter or its parametrized value, ten times as fast as `get_parameter`."""
        found = self._parameters.get(name)
        if found is not None:
            return found
        module = self
        *path, last = name.split(".")
        for part in path:
            module = module._modules[part]
        found = module._parameters.get(last)
        return getattr(module, last) if found is None else found

    def sources(self, name: str) -> list[torch.Tensor]:
        """Return the module's parameters that a weight of the program joins."""
        return [self.own_parameter(name)]

    def is_coded(self, name: str) -> bool:
        """Whether a weight is kept as codes alone, whose scales then are its clips."""
        return all(isinstance(part, CodedWeight) for part in self.sources(name))

    def values_of(self, name: str) -> torch.Tensor:
        """Return a parameter as programs read it: with zeros where a mask leaves values out."""
        found = self.own_parameter(name)
        return found if self.weight_masks is None else self.weight_masks.apply(self, name, found)

    def changes(self, parts: Sequence[torch.Tensor], clip: torch.Tensor) -> bool:
        """Whether training changes a weight that joins `parts`, or its clip."""
        if not self.training or clip.requires_grad:
            return self.training
        for part in parts:
            if part.requires_grad:
                return True
        return False

    def every_parameter(self) -> list[nn.Parameter]:
        """List all parameters, ten times as fast as `parameters` for a module without children."""
        if self._modules:
            return list(self.parameters())
        return [parameter for parameter in self._parameters.values() if parameter is not None]

    def first_parameter(self) -> nn.Parameter:
        """Return one parameter, which knows the module's device."""
        if self._modules:
            return next(self.parameters())
        return next(one for one in self._parameters.values() if one is not None)

    def trained(self) -> bool:
        """Whether any of its parameters is trained."""
        return any([parameter.requires_grad for parameter in self.every_parameter()])

    # Masks

    def prunable(self) -> list[str]:
        """Return the names of the weights that may get masks: the weights of products."""
        return [name for name, declared in self.declared.items() if declared.kind is Kind.WEIGHT]

    def add_masks(self) -> None:
        """Give prunable weights masks that keep all; ValueError unless 4 divides their widths."""
        names = [] if self.quant.pruning is None else self.prunable()
        if names:
            from lsq.layers.weight_masks import WeightMasks  # late: dense layers do not need it

            self.weight_masks = WeightMasks(straight_through=self.quant.pruning.every > 0)
        for name in names:
            self.weight_masks.add(self, name)

    def other_names(self) -> list[str]:
        """Return the names of the entries in state dicts that only some modules have, as masks."""
        return [] if self.weight_masks is None else self.weight_masks.state_names(self)

    # Clips

    def clips(self, kinds: Collection[Kind] = CLIPS) -> dict[str, nn.Parameter]:
        return {
            name: self.own_parameter(name)
            for name, declared in self.declared.items()
            if declared.kind in kinds
        }

    def activation_clips(self) -> dict[str, nn.Parameter]:
        return self.clips((Kind.ACTIVATION_CLIP,))

    @property
    def calibrated(self) -> bool:
        """Whether the clips of activations hold measured values."""
        return self.schedule.calibrated

    # torch.distributed.checkpoint looks names of state dicts up as attributes

    @property
    def passes(self) -> int:
        """Training passes so far; -1: the first pass will measure all clips."""
        return self.schedule.passes

    @property
    def float_fallback(self) -> bool:
        """Whether the module has gone on in floats."""
        return self.schedule.float_fallback

    @property
    def format(self) -> dict[str, Any]:
        """The number format of its clips, as fields of QuantConfig."""
        return clip_format.fields_of(self.quant)

    def let_clips_learn(self, trained: bool) -> None:
        """Let clips require gradients if the weights beside them are `trained` and clips learn."""
        for clip in self.clips().values():
            clip.requires_grad_(trained and self.quant.learned)

    # Measuring

    def calibrate_weights(self) -> None:
        """Measure the clip of every weight in this module, as `clip_init` says."""
        calibration = Calibration(self.target)
        self._measure_weights(calibration)
        torch.autograd.graph.increment_version(list(self.clips().values()))
        self.measured.note(calibration.written)
        calibration.finish()

    def _measure_weights(
        self,
        calibration: Calibration,
        *,
        again: bool = False,
        anew: Collection[str] = (),
        all: bool = True,
    ) -> None:
        """Measure clips of weights, hidden from autograd: earlier passes may await their backward.

        `again`: search near the present clips, and skip weights that have not changed. `anew`:
        weights whose values were replaced, so that their clips mean nothing. `all`: False measures
        the weights in `anew` alone.
        """
        for name, declared in self.declared.items():
            if declared.clip is None or not (all or name in anew) or self.is_coded(name):
                continue
            values, near = self.values_of(name), again and name not in anew
            if not self.weight_state.changed(name, values) and near:
                continue
            self._measure(
                calibration,
                name,
                values.t() if declared.in_out else values,
                declared.clip,
                self.quant.weight_form(name),
                again=near,
                per_channel=self.quant.weight_clips(name, 2) == 2,
                fixed=self.quant.weight_clip,
            )
        self._drop_codes()
        self._forget_clips()

    def _measure(
        self,
        calibration: Calibration,
        name: str,
        x: torch.Tensor,
        clip: str,
        form,
        *,
        into: torch.Tensor | None = None,
        widens: bool = False,
        **options,
    ) -> None:
        """Measure the clip of x; `into`: as the pass reads it; `widens`: only grow, ignore NaN."""
        parameter, how = self.own_parameter(clip), self.quant.clip_init
        kept = parameter.data
        target = kept.float() if into is None else into
        before = target.clone() if widens else None
        how = how if self.quant.learned else "absmax"
        options |= {"percentile": self.quant.percentile, "lenient": widens}
        calibration.measure(name, x, target, how, form, **options)
        if before is not None:
            torch.maximum(target.data, before.data, out=target.data)
        if target.data_ptr() != kept.data_ptr():
            kept.copy_(target)
        calibration.written[clip] = parameter

    def allocate_clips(self) -> None:
        """Give clips on the meta device memory, once a parameter beside them has some."""
        device = next((one.device for one in self.parameters() if not one.is_meta), None)
        for name, clip in self.clips().items():
            if clip.is_meta and device is not None:
                self._replace_clip(self.declared[name], clip, device)

    def _replace_clip(self, declared: Parameter, clip: torch.Tensor, device) -> nn.Parameter:
        holder, last = self._holder(declared.name)
        made = _made(declared, device, clip.requires_grad)
        holder.register_parameter(last, made)
        return made

    def _fit_clips(self, program: Program, parameters: dict[str, torch.Tensor]) -> list[str]:
        """Resize clips to resized weights, return their names; ValueError for other parameters."""
        resized = []
        for virtual in program.parameters:
            name, declared, found = virtual.name, virtual.declared, parameters[virtual.name]
            if found.shape == virtual.shape:
                continue
            if declared.kind not in CLIPS:
                raise ValueError(
                    f"{self.state_name(name)} of this {type(self).__name__} is {list(found.shape)},"
                    f" but was {list(virtual.shape)} when the layer was made or converted; make it"
                    " anew, or call lsq.revert(model) before sizes change and lsq.convert(model)"
                    " afterwards"
                )
            self.declared |= {one.name: one.declared for one in program.parameters}
            parameters[name] = self._replace_clip(declared, found, found.device)
            resized += [one.name for one in program.parameters if one.declared.clip == name]
        return resized

    # Limits

    def limit_clip_steps(self) -> None:
        """Limit the relative change of every clip since the last training pass to `clip_step`.

        A step of Adam is about as long as its learning rate, and could take a small clip across
        zero. NaN stays. Raises RuntimeError if the first step has undone the first measurement.
        """
        if self.measured.stepped:
            self.measured.check_step(self.clips(), type(self).__name__)
        if self.quant.learned and not self.measured.sharded:
            parameter_state.limit_steps(self.clips().values(), self.quant.clip_step)

    def _remember_clips(self) -> None:
        if self.quant.learned:
            self.measured.limit = self.quant.clip_step
            if not self.measured.sharded:
                parameter_state.remember(self.clips().values(), self.quant.clip_step)

    def _forget_clips(self) -> None:
        for clip in self.clips().values():
            parameter_state.forget(clip)

    def follow_clips(self) -> None:
        """Update activation clips from recorded magnitudes, unless they learn or are shards."""
        clips = self.activation_clips() if self.followed.recorded else {}
        if not any(map(is_shard, clips.values())):
            self.followed.follow(clips)

    @torch.no_grad()
    def bring_clips_up(self) -> None:
        """Update all clips that do not learn, as the next pass would."""
        self.follow_clips()
        if self.quant.learned or not self.schedule.begun:
            return
        for name, declared in self.declared.items():
            clip = None if declared.clip is None else self.own_parameter(declared.clip)
            if clip is None or clip.is_meta or any(map(is_shard, (clip, *self.sources(name)))):
                continue
            values = self.values_of(name)
            if isinstance(values, CodedWeight):
                values.write_clip(clip.data)
            else:
                rows = values.t() if declared.in_out else values
                # resized weights get clips of their size in the next pass
                form = self.quant.weight_form(name)
                if len(clip) == form.scales(len(rows)):
                    clip.data.copy_(form.measured_clips(rows, clip))

    # Whatever may change weights drops the kept codes

    def _let_go(self) -> None:
        """Forget codes and clips: parameters are about to be loaded, moved or swapped."""
        self._drop_codes()
        self._forget_clips()
        self.followed.forget()
        self.measured.forget()
        swapped = torch.__future__.get_swap_module_params_on_conversion()
        for parameter in self.parameters():
            if swapped or is_shard(parameter):
                parameter_state.drop(parameter)

    def _drop_codes(self) -> None:
        self.weight_state.clear()
        for parameter in self.every_parameter():
            parameter_state.withdraw(parameter)

    def _settle_clips(self) -> None:
        """Bring clips up to date after the last pass and the last step."""
        self.limit_clip_steps()
        self.follow_clips()
        parameter_state.limit_shards(self.measured.settle(self.clips()))

    def __getstate__(self):
        self.limit_clip_steps()  # the copy does not know the clips of the last pass
        self.follow_clips()
        return {**self.__dict__}

    def __setstate__(self, state):
        super().__setstate__(state)
        steps.know(self, _agree)

    def train(self, mode: bool = True):
        if not (mode and self.training):
            self._drop_codes()
        self._settle_clips()
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *arguments, **options):
        self.limit_clip_steps()
        self.follow_clips()
        self._let_go()
        clips = [
            one for clip in self.clips().values() for one in (clip, clip.grad) if one is not None
        ]
        stay = set(map(id, clips))

        def applied(tensor: torch.Tensor) -> torch.Tensor:
            made = fn(tensor)
            if id(tensor) in stay and made.dtype != tensor.dtype:
                return tensor.to(made.device)
            return made

        super()._apply(applied, *arguments, **options)
        if not self.schedule.begun:  # `to_empty` leaves arbitrary values in clips
            self.allocate_clips()
            for name, clip in self.clips().items():
                self.declared[name].initialise(clip.data)
        return self


def _made(declared: Parameter, device: torch.device | None, trained: bool = True) -> nn.Parameter:
    made = nn.Parameter(
        torch.empty(declared.shape, dtype=torch.float32, device=device), requires_grad=trained
    )
    declared.initialise(made)
    return made
