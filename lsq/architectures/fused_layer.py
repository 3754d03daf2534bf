"""Whole layers of transformers as one program each, in the place of the layers, whose parameters stay theirs."""

import dataclasses
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import torch
from torch import nn

from lsq.architectures.batch import causal, everything, memory_packing_of, packing_of, rotation_of
from lsq.architectures.joined import Joined, lie_together
from lsq.architectures.rounded_weights import Rounded, rounded_weights
from lsq.config import LayerConfig, QuantConfig
from lsq.layers import programs
from lsq.layers.blocks import Sentences
from lsq.layers.in_place import InPlace
from lsq.layers.module import ProgramModule
from lsq.layers.packing import Packing, packing_options
from lsq.layers.places import placed
from lsq.layers.positions import position_inputs
from lsq.layers.programs import Mode
from lsq.layers.schedule import recomputing
from lsq.layers.torch_compile import beside_the_graph
from lsq.program import upkeep
from lsq.program.parameters import Parameter
from lsq.program.program import Program

TRAINED_INPUTS = ("x", "memory", "relative_bias")
"""Names of the inputs of programs that may need a gradient."""
FLOAT16 = torch.finfo(torch.float16).min, torch.finfo(torch.float16).max

UNDIFFERENTIATED = (
    b"keys and values that a fused layer of lsq put into a cache have no gradient: give the whole sequence to one "
    b"pass, decode under torch.no_grad(), or convert with fused=False"
)
_unfilled: weakref.WeakKeyDictionary[object, set[int]] = weakref.WeakKeyDictionary()
"""Caches that training passes were given -> the numbers of the layers that put nothing there."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderOutput:
    """What a decoder's layers attend to."""

    states: torch.Tensor
    """[B, S, H]"""
    packing: Packing


class FusedLayer(InPlace):
    """A layer of another model that runs as one program of lsq's.

    The modules inside it hold its parameters and are not called in training: state dicts, optimizers and checkpoints
    find everything where it was. Clips are parameters of the layer itself. Where a program has one parameter of
    several, such as queries, keys and values, it gets them joined.

    A pass that needs what the program does not give, such as a step of decoding with a cache, is the other layer's own,
    on weights as the program rounds them.
    """

    STATE = (*ProgramModule.STATE, "config", "rounded", "joined")
    SOURCES: ClassVar[Mapping[str, tuple[str, ...]]]
    """Names of the program's parameters -> those of the layer that they are made of, one after another."""
    CAUSAL: ClassVar[bool]
    """Whether queries see no keys behind them."""
    ATTENTION: ClassVar[str] = "self_attn"
    """The module inside that attends, and knows the layer's number."""
    CROSS: ClassVar[bool] = False
    """Whether it also attends to an encoder's output."""

    @staticmethod
    def config_of(layer: nn.Module, quantization: QuantConfig) -> LayerConfig:
        """What the layer is.

        Raises:
            ValueError: something that no program is for.
        """
        raise NotImplementedError

    @staticmethod
    def dropouts(layer: nn.Module) -> dict[str, float]:
        """Probabilities that others may change: those of LayerConfig, by name. They are read in every training pass."""
        return {}

    def take_place(self, quant: QuantConfig, path: str) -> None:
        self.config, trained = self.config_of(self, quant), self.trained()
        one = Sentences(rows=1, count=1)
        build = partial(self._program, one, source=one if self.CROSS else None)
        self.config = placed(self.config, path, build, self.state_names)
        self.begin(self.config.quant)
        self.rounded = Rounded()
        self.joined: dict[str, torch.Tensor | None] = {}
        self.declare(build, measure=False)
        self._join()
        for clip in self.clips().values():
            clip.requires_grad_(trained)

    def extra_repr(self) -> str:
        return f"one program in {'int8' if self.quant.quantized and not self.schedule.fallen else 'floats'}"

    # Parameters, which others hold

    def take_parameters(self, every: Iterable[Parameter]) -> None:
        every = list(every)
        super().take_parameters(one for one in every if one.name not in self.SOURCES)
        for one in every:
            self.declared[one.name] = one

    def state_name(self, name: str) -> str:
        return name.replace(".", "_")

    def state_names(self, name: str) -> Sequence[str]:
        return self.SOURCES.get(name) or super().state_names(name)

    def _holder(self, path: str) -> tuple[nn.Module, str]:
        return self, self.state_name(path)

    def sources(self, name: str) -> list[torch.Tensor]:
        """The parameters that one of the program's is made of.

        Raises:
            ValueError: a module inside the layer is another one now.
        """
        found = []
        for path in self.SOURCES[name]:
            *modules, last = path.split(".")
            holder = self
            for part in modules:
                holder = holder._modules[part]
            if last not in holder._parameters:
                raise ValueError(
                    f"{path} of this {type(self).__name__} is gone: a {type(holder).__name__} has taken its place. "
                    "Add adapters before lsq.convert, or convert with fused=False"
                )
            found.append(holder._parameters[last])
        return found

    def own_parameter(self, name: str) -> torch.Tensor:
        if name not in self.SOURCES:
            return self._parameters[self.state_name(name)]
        found = self.sources(name)
        return found[0] if len(found) == 1 else Joined.apply(self.joined.get(name), *found)

    def __getstate__(self):
        return {**super().__getstate__(), "joined": {}}  # of other parameters than a copy's

    def _join(self) -> None:
        for name in self.SOURCES:
            if name in self.declared:
                self.joined[name] = lie_together(self.sources(name))

    def _apply(self, *arguments, **options):
        super()._apply(*arguments, **options)
        self._join()
        return self

    def _drop_codes(self) -> None:
        self.codes.clear()
        self.rounded.clear()
        for name in self.SOURCES:
            if name in self.declared:
                for parameter in self.sources(name):
                    upkeep.withdraw(parameter)

    def mode_of(self, inputs: Mapping[str, torch.Tensor]) -> Mode:
        """How a program of this layer runs on these inputs now."""
        inputs = {name: inputs[name] for name in TRAINED_INPUTS if name in inputs}
        mode = self.mode(*inputs.values())
        if not mode.backward:
            return mode
        needs = {name: self._trains(name) for name in self.declared}
        needs |= {name: tensor.requires_grad for name, tensor in inputs.items()}
        if all(needs.values()):
            return mode
        return dataclasses.replace(mode, wanted=frozenset(name for name, needed in needs.items() if needed))

    def _trains(self, name: str) -> bool:
        found = self.sources(name) if name in self.SOURCES else [self.own_parameter(name)]
        return any(parameter.requires_grad for parameter in found)

    # Passes

    def _program(
        self, sentences: Sentences, mode: Mode, *, source: Sentences | None = None, places: int | None = None,
        heads: bool = False,
    ) -> Program:  # fmt: skip
        if source is not None:
            return programs.decoder_layer(self.config, sentences, source, mode)
        config = _with_places(self.config, places)
        return programs.encoder_layer(config, sentences, mode, causal=self.CAUSAL, heads=heads)

    @beside_the_graph
    def packing(self, x: torch.Tensor, mask: torch.Tensor | None, cache: object = None) -> Packing | None:
        """How x [B, T, H] is packed under a mask of the model's.

        `cache`: of keys and values. Where gradients are wanted in training mode nothing is put there, since nobody
        decodes with it; else, what is first to come there is the program's, and has no gradient.

        Returns:
            None where the program has not what is asked for: an unusual mask, a cache, probabilities of attention.

        Raises:
            ValueError: a training pass was given this cache before, and did not fill it.
        """
        shape, seen = tuple(x.shape[:2]), _causal(self.config.window) if self.CAUSAL else everything
        if not x.numel():  # which transformers' own layers cannot take
            return packing_of(None, shape, seen, **packing_options(self))
        begins = cache is None or self._begins(cache)
        whole = mask is None or mask.shape[-1] == x.shape[1]
        if not (begins and whole) or _attention_is_recorded():
            return None
        packing = packing_of(mask, shape, seen, **packing_options(self))
        return None if packing is not None and not packing.rows and self._fills(cache) else packing

    def _begins(self, cache: object) -> bool:
        """Whether a pass of the program comes first to a cache."""
        if cache.get_seq_length(self._number):
            return False
        unfilled = _unfilled.setdefault(cache, set())
        if self._number in unfilled and not recomputing():
            raise ValueError(
                "this cache was given to a training pass, which does not fill it; decode in eval mode or under "
                "torch.no_grad() from the beginning"
            )
        if self._fills(cache):
            return True
        measures = self.training and self.calibration_due()  # of whose passes some are for that alone
        program = self.training and torch.is_grad_enabled() or measures
        if program:
            unfilled.add(self._number)
        return program

    def _fills(self, cache: object) -> bool:
        return cache is not None and not (self.training and torch.is_grad_enabled()) and not self.CROSS

    @beside_the_graph
    def memory(self, states: torch.Tensor, mask: torch.Tensor | None) -> EncoderOutput | None:
        """An encoder's output [B, S, H] under a mask of the model's; None: the program has not what is asked for."""
        packing = memory_packing_of(mask, tuple(states.shape[:2]), **packing_options(self))
        return None if packing is None else EncoderOutput(states=states, packing=packing)

    @beside_the_graph
    def fused(
        self, x: torch.Tensor, packing: Packing, *, rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
        memory: EncoderOutput | None = None, bias: torch.Tensor | None = None, cache: object = None,
    ) -> torch.Tensor:  # fmt: skip
        """x [B, T, H] -> the same after the layer, zero in padding. Of padding alone nothing is computed or counted.

        Args:
            x: in any float dtype.
            packing: of x.
            rotation: cosine, sine [B or 1, T, D], where heads turn.
            memory: what is attended to, where CROSS is.
            bias: a table [buckets, N] of biases by distance that comes from another layer.
            cache: of keys and values, empty; it gets them but in training passes.
        """
        if not packing.rows:
            others = [one for one in (memory and memory.states, bias) if one is not None]
            return packing.unpack(self.reached(packing.pack(x)[:0], *others))
        self._read_dropouts()
        inputs, places = {"x": packing.pack(x), "starts": packing.starts}, None
        if memory is not None:
            inputs |= {"memory": memory.packing.pack(memory.states), "memory_starts": memory.packing.starts}
        if rotation is not None:
            inputs["rotation"], inputs["places"] = rotation_of(*rotation, packing)
            places = len(inputs["rotation"])
        else:
            inputs |= position_inputs(self.config, packing.positions, packing.shape[1], causal=self.CAUSAL, table=bias)
        mode, fills = self.mode_of(inputs), self._fills(cache)
        build = partial(self._program, packing.sentences, source=memory and memory.packing.sentences, places=places)
        y, *heads = self.execute(build(mode, heads=fills and not mode.backward), inputs)
        if fills and mode.backward:  # programs that go back have no other results
            with torch.no_grad():
                _, *heads = self.execute(build(self.mode_of(inputs), heads=True), inputs)
        if fills:
            self._fill(cache, packing, x.dtype, y, *heads)
        if x.dtype == torch.float16:  # models of bfloat16 go beyond; their own layers stay finite there, too
            y = y.clamp(*FLOAT16)
        return packing.unpack(y).to(x.dtype)

    @property
    def _number(self) -> int:
        return self.get_submodule(self.ATTENTION).layer_idx

    def _fill(
        self, cache: object, packing: Packing, dtype: torch.dtype, y: torch.Tensor, heads: torch.Tensor,
        scale: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Give keys and values, behind the queries in `heads` [M, ...], to a cache of transformers.

        They have no gradient; where `y`, the result beside them, has one, whoever goes back to them is told.
        """
        values = (heads if scale is None else heads * scale).to(dtype)
        if y.requires_grad:
            values = torch._C._functions.DelayedError(UNDIFFERENTIATED, 1)(values.requires_grad_())
        columns = [self.config.query_columns, self.config.key_columns, self.config.key_columns]
        _, *both = packing.unpack(values).split(columns, dim=2)
        keys, values = (one.unflatten(2, (self.config.of_keys, -1)).transpose(1, 2) for one in both)
        cache.update(keys, values, self._number)

    def _read_dropouts(self) -> None:
        now = self.dropouts(self) if self.training else {}
        if any(getattr(self.config, name) != value for name, value in now.items()):
            self.config = dataclasses.replace(self.config, **now)

    def own_pass(self, *arguments, **options):
        """The pass of the layer that this one was, on weights that are rounded as the program rounds them."""
        with rounded_weights(self):
            return self.float_class.forward(self, *arguments, **options)


def _attention_is_recorded() -> bool:
    """Whether a model of transformers gathers probabilities of attention, by hooks on modules that programs pass by."""
    from transformers.utils import output_capturing

    return not {"attentions", "cross_attentions"}.isdisjoint(output_capturing._active_collector.get() or ())


@lru_cache(maxsize=64)
def _causal(window: int | None):
    return partial(causal, window)


@lru_cache(maxsize=256)
def _with_places(config: LayerConfig, places: int | None) -> LayerConfig:
    if places is None:
        return config
    return dataclasses.replace(config, rotary=dataclasses.replace(config.rotary, places=places))
