"""What every module with declared parameters shares: its parameters, and clips that are measured, limited and saved."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lsq.config import QuantConfig
from lsq.dist import replicas
from lsq.layers import clip_format
from lsq.layers.schedule import Schedule
from lsq.layers.weight_codes import WeightCodes
from lsq.layers.weight_masks import SUFFIX, WeightMasks
from lsq.ops.calibration import Calibration
from lsq.program import shards, upkeep
from lsq.program.parameters import CLIPS, Kind, Parameter


class ClippedModule(nn.Module):
    """A module that has the parameters that a program declares.

    A parameter "self_attn.out_weight" of the program is the attribute `out_weight` of a plain child module `self_attn`.

    `schedule` says when clips are measured: in the first training pass, and again while tensors still grow fast.
    `codes` are those of its weights, and `weight_masks` say what of the weights programs read, if not all. Clips stay
    float32 when the module is converted to another dtype.
    """

    def begin(self, quantization: QuantConfig) -> None:
        """Set what is not a parameter."""
        self.quant = quantization
        self.declared: dict[str, Parameter] = {}
        self.codes = WeightCodes()
        self.schedule = Schedule(quantization)
        self.weight_masks: WeightMasks | None = None
        replicas.watch(self)

    def take_parameters(self, every: Iterable[Parameter]) -> None:
        """Make the parameters that a program declares, beside those that are there already, which stay."""
        device = next((one.device for one in self.parameters()), None)
        for declared in every:
            holder, name = self._holder(declared.name)
            self.declared[declared.name] = declared
            if holder._parameters.get(name) is None:
                made = nn.Parameter(torch.empty(declared.shape, device=device))
                declared.initialise(made)
                holder.register_parameter(name, made)

    def _holder(self, path: str) -> tuple[nn.Module, str]:
        """The module that holds the parameter of that dotted name, and its name there."""
        *parts, name = path.split(".")
        holder = self
        for part in parts:
            if part not in dict(holder.named_children()):
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        return holder, name

    def state_name(self, name: str) -> str:
        """What a declared parameter is called in this module's state dict."""
        return name

    def state_names(self, name: str) -> Sequence[str]:
        """The same of one that may be made of several."""
        return [self.state_name(name)]

    def own_parameter(self, name: str) -> nn.Parameter:
        """What `get_parameter` finds, in a tenth of the time: every pass asks for all, several times."""
        module = self
        *path, last = name.split(".")
        for part in path:
            module = module._modules[part]
        return module._parameters[last]

    def sources(self, name: str) -> list[torch.Tensor]:
        """The parameters that a weight of the program is made of, one after another."""
        return [self.own_parameter(name)]

    def values_of(self, name: str) -> torch.Tensor:
        """What programs read of a declared parameter: all of it, or what a mask leaves."""
        found = self.own_parameter(name)
        return found if self.weight_masks is None else self.weight_masks.apply(self, name, found)

    def prunable(self) -> list[str]:
        """The weights that masks may be of: those of products."""
        return [name for name, declared in self.declared.items() if declared.kind is Kind.WEIGHT]

    def add_masks(self) -> None:
        """Give each of them a mask that keeps everything, if they are to be sparse.

        Raises:
            ValueError: a width is no multiple of 4.
        """
        names = [] if self.quant.pruning is None else self.prunable()
        if names:
            self.weight_masks = WeightMasks(straight_through=self.quant.pruning.every > 0)
        for name in names:
            self.weight_masks.add(self, name)

    def mask_names(self) -> list[str]:
        """What masks of weights are called in this module's state dict."""
        masked = self.weight_masks.names if self.weight_masks is not None else ()
        return [self.state_name(name) + SUFFIX for name in masked]

    def every_parameter(self) -> list[nn.Parameter]:
        """What `parameters` yields, in a tenth of the time where no module is in this one: every pass asks for them."""
        if self._modules:
            return list(self.parameters())
        return [parameter for parameter in self._parameters.values() if parameter is not None]

    def clips(self) -> dict[str, nn.Parameter]:
        """Every clip of this module by name."""
        return {name: self.own_parameter(name) for name, one in self.declared.items() if one.kind in CLIPS}

    @property
    def calibrated(self) -> bool:
        """Whether the clips of activations hold measured values."""
        return self.schedule.calibrated

    @property
    def passes(self) -> int:
        """Training passes so far; -1: the first pass will measure all clips. In state dicts, as `calibrated` is."""
        return self.schedule.passes

    @property
    def fallen(self) -> bool:
        """Whether it goes on in floats; in state dicts, too."""
        return self.schedule.fallen

    @property
    def format(self) -> dict[str, Any]:
        """What its clips mean, as fields of QuantConfig; in state dicts, too."""
        return clip_format.fields_of(self.quant)

    # Measuring

    def calibrate_weights(self) -> None:
        """Measure the clip of every weight in this module, as `weight_init` says."""
        calibration = Calibration(self.target)
        self._measure_weights(calibration)
        torch.autograd.graph.increment_version(list(self.clips().values()))
        shards.measured(self, calibration.written)
        calibration.finish()

    def _measure_weights(self, calibration: Calibration, again: bool = False) -> None:
        """The same, unseen by autograd: an earlier pass of this module may still await its backward pass.

        `again`: clips hold what was measured before, which shortens the search, and stay while weights are the same.
        """
        for name, declared in self.declared.items():
            if declared.clip is not None:
                values = self.values_of(name)
                values = values.t() if declared.by_inputs else values
                if not self.codes.changed(name, values) and again:
                    continue
                self._measure(
                    calibration, name, values, declared.clip, self.quant.weight_init, self.quant.weight_form(name),
                    per_channel=self.quant.weight_clips(name, 2) == 2,
                    fixed=self.quant.weight_clip, percentile=self.quant.percentile, again=again,
                )
        self._drop_codes()
        self._forget_clips()

    def _measure(
        self, calibration: Calibration, name: str, x: torch.Tensor, clip: str, *how, into: torch.Tensor | None = None,
        **options,
    ) -> None:  # fmt: skip
        """Measure the clip of x. `into`: where a pass reads it, if that is not the parameter itself."""
        parameter = self.own_parameter(clip)
        kept = parameter.data
        place = kept.float() if into is None else into
        calibration.measure(name, x, place, *how, **options)
        if place.data_ptr() != kept.data_ptr():
            kept.copy_(place)
        calibration.written[clip] = parameter

    def _start_clips(self) -> None:
        """Let clips that nobody has measured be where weights are, and hold what they begin with."""
        self._place_clips()
        for name, clip in self.clips().items():
            self.declared[name].initialise(clip.data)

    def _place_clips(self) -> None:
        """Give memory to clips of the meta device, once the parameters beside them have some."""
        device = next((one.device for one in self.parameters() if not one.is_meta), None)
        for name, clip in self.clips().items():
            if clip.is_meta and device is not None:
                made = nn.Parameter(torch.empty(clip.shape, device=device), requires_grad=clip.requires_grad)
                self.declared[name].initialise(made)
                holder, last = self._holder(name)
                holder.register_parameter(last, made)

    # Limits

    @torch.no_grad()
    def limit_clip_steps(self) -> None:
        """Bring every clip back to within `clip_step`, relatively, of where the last training pass saw it. NaN stays.

        An optimizer such as Adam takes steps about as long as its learning rate, whatever it steps on: several percent
        of a small clip each time, in a random direction, and across zero sooner or later. Where a clip was is
        forgotten when it is measured or loaded; lsq.optim.Adam limits its steps itself.

        Raises:
            RuntimeError: the first step has put clips back to what they were before they were measured.
        """
        shards.check_step(self)
        clips = {} if shards.sees_copies(self) else self.clips()
        limited = [(clip.data, upkeep.before(clip)) for clip in clips.values()]
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

    # Whatever may change weights drops the kept codes, and so does a copy

    def _drop_codes(self) -> None:
        self.codes.clear()
        for name, declared in self.declared.items():
            if declared.clip is not None:
                upkeep.withdraw(self.own_parameter(name))

    def __getstate__(self):
        self.limit_clip_steps()  # the copy does not know where clips were
        return {**self.__dict__}

    def __setstate__(self, state):
        super().__setstate__(state)
        replicas.watch(self)

    def train(self, mode: bool = True):
        if mode != self.training:
            self._drop_codes()
        self.limit_clip_steps()
        upkeep.limit_shards(shards.settle(self))
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *arguments, **options):
        self._drop_codes()
        self.limit_clip_steps()
        self._forget_clips()  # they may move to another device
        shards.forget(self)
        for parameter in filter(shards.is_shard, self.parameters()):
            upkeep.drop(parameter)
        clips = set(map(id, self.clips().values()))

        def applied(tensor: torch.Tensor) -> torch.Tensor:
            made = fn(tensor)
            return tensor.to(made.device) if id(tensor) in clips and made.dtype != tensor.dtype else made

        super()._apply(applied, *arguments, **options)
        if not self.schedule.begun:  # `to_empty` leaves anything in them
            self._start_clips()
        return self
