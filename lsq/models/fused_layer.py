"""Whole layers of other models that run as one program each; only their class changes."""

import dataclasses
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import torch
from torch import nn

from lsq.config import LayerConfig, QuantConfig
from lsq.layers import programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.builder import Mode, in_floats
from lsq.layers.coded_weight import CodedWeight
from lsq.layers.in_place import InPlace
from lsq.layers.model_formats import config_at
from lsq.layers.module import ProgramModule, beside_the_graph
from lsq.layers.packing import Packing, packing_options
from lsq.layers.positions import position_inputs
from lsq.layers.schedule import recomputing
from lsq.models.adapters import Adapted, adapted, block_matrix
from lsq.models.batch import encoder_packing_of, packing_of, rotation_of, visible
from lsq.models.comparison import compare
from lsq.models.exact import (
    RECORDER,
    altered,
    base_of,
    check_exact,
    hooked_everywhere,
    is_adapter,
    module_at,
    named_inside,
    own_methods,
    patched_now,
    unknown_attention,
)
from lsq.models.fused_weights import Joined, RoundedWeights, lie_together
from lsq.models.reading import Attributes, Modules, activation_of, read, shape_of
from lsq.program.program import Program
from lsq.program.tensor import Kind, Parameter
from lsq.run.backends import Backend, backend
from lsq.run.executor import FLOATS, Execution

TRAINED_INPUTS = ("x", "memory", "relative_bias")
FLOAT16 = torch.finfo(torch.float16).min, torch.finfo(torch.float16).max
_OPTIONS = "block_table cu_seq_lens_k cu_seq_lens_q is_causal position_bias s_aux"
ATTENTION_OPTIONS = frozenset({*_OPTIONS.split(), "sliding_window", "softcap"})
"""Options of a pass that change what attention of transformers computes."""
ATTENTIONS = frozenset({"attentions", "cross_attentions"})
UNFILLED = "_lsq_unfilled"
"""The attribute of a cache with the numbers of layers that did not fill it in training."""
UNDIFFERENTIATED = (
    b"keys and values that a fused layer of lsq put into a cache have no gradient: give the whole"
    b" sequence to one pass, decode under torch.no_grad(), or convert with fused=False"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class SideInputs:
    """Inputs of a layer other than its hidden states."""

    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    """Rotary embeddings: cosine, sine [B or 1, T, D]."""
    states: torch.Tensor | None = None
    """Encoder output [B, S, H], to which a CROSS layer attends."""
    source: Packing | None = None
    """The packing of `states`."""
    bias: torch.Tensor | None = None
    """A table [buckets, N] of biases by distance that comes from another layer."""
    pairs: torch.Tensor | None = None
    """These biases for all pairs of tokens, [1, N, T, T], as the layer's own code takes them."""

    def first(self, tokens: int, target: Backend) -> "SideInputs":
        """Return the side inputs of the first tokens of the first sequence."""
        states = None if self.states is None else self.states[:1, :tokens].detach()
        return SideInputs(
            rotation=self.rotation and tuple(one[:1, :tokens] for one in self.rotation),
            states=states,
            source=None if states is None else Packing(shape=states.shape[:2], backend=target),
            bias=self.bias,
            pairs=None if self.pairs is None else self.pairs[:1, :, :tokens, :tokens].detach(),
        )


class FusedLayer(InPlace):
    """A layer of another model that runs as one program of lsq.

    Inner modules hold its parameters and are not called; clips are parameters of the layer itself.
    Parameters that are one in the program are joined, such as queries, keys and values. The layer's
    own code runs on rounded weights if a pass needs more than the program gives (decoding with a
    cache). It also runs while patches or hooks change what the layer computes.
    """

    STATE = (
        *ProgramModule.STATE,
        "config",
        "rounded",
        "joined",
        "kinds",
        "departed",
        "compared",
        "adapted",
        "positional",
    )
    PARTS: ClassVar[Mapping[str, str]]
    """Paths of inner modules with classes of the layer's file -> ends of the classes' names."""
    MODULES: ClassVar[Modules]
    SOURCES: ClassVar[Mapping[str, tuple[str, ...]]]
    """The program's parameters -> paths of the layer's parameters that each of them joins."""
    INPUTS: ClassVar[tuple[str, ...]] = ()
    """Other parameters of the layer, which programs take as inputs."""
    attends: ClassVar[Callable[[nn.Module], nn.Module]]
    """Returns the self-attention module of a layer, which knows the layer's number."""
    FIXED: ClassVar[Mapping[str, object]] = {}
    """Fields of LayerConfig that all layers of the class have."""
    SHAPE: ClassVar[Attributes]
    """Attributes from which fields of LayerConfig are read once."""
    SETTINGS: ClassVar[Attributes]
    """Attributes from which fields are read in every pass, since users may change them."""
    causal: bool = False
    CROSS: ClassVar[bool] = False
    """Whether it also attends to encoder output."""

    @classmethod
    def config_of(cls, layer: nn.Module, quantization: QuantConfig) -> LayerConfig:
        """Read the configuration of a layer; raises ValueError if no program has it."""
        fields = {**cls.FIXED, **cls.shape(layer), **cls.settings(layer)}
        return LayerConfig(**fields, quant=quantization)

    @classmethod
    def shape(cls, layer: nn.Module) -> dict[str, object]:
        """Read SHAPE and the shape of MODULES; raises ValueError if no program has these values."""
        shape = shape_of(layer, cls.MODULES) | read(layer, cls.SHAPE)
        if "activation" in shape:
            shape["activation"] = activation_of(shape["activation"])
        return shape

    @classmethod
    def settings(cls, layer: nn.Module) -> dict[str, object]:
        """Read SETTINGS; raises ValueError if no program has these values."""
        return read(layer, cls.SETTINGS)

    @property
    def attention_kind(self) -> str:
        """The implementation of attention in the layer's own code, as transformers names it."""
        return self.attends(self).config._attn_implementation or "eager"

    @classmethod
    def check(cls, layer: nn.Module) -> None:
        """Raise a ValueError for a layer that may compute something else than the program."""
        adapted(layer, cls.SOURCES)  # raises for adapters without a program
        for dtype in {parameter.dtype for parameter in layer.parameters()} - set(FLOATS):
            raise ValueError(f"it has parameters of {dtype}")
        known = {*cls.INPUTS, *(path for paths in cls.SOURCES.values() for path in paths)}
        check_exact(layer, cls.PARTS, known)
        cls._check_attention(layer)

    @classmethod
    def _check_attention(cls, layer: nn.Module) -> None:
        attention = cls.attends(layer)
        unknown = unknown_attention(attention)
        if unknown:
            raise ValueError(unknown)
        if bool(attention.is_causal) is not cls.causal:
            raise ValueError(f"its attention is {'not ' if cls.causal else ''}causal")

    def take_place(self, quant: QuantConfig, path: str) -> None:
        self.config = self.config_of(self, quant)
        trained = any(
            one.requires_grad for name, one in self.named_parameters() if not is_adapter(name)
        )
        self._take_adapters(adapted(self, self.SOURCES))
        self.kinds = {path: type(module) for path, module in named_inside(self)}
        self.departed, self.compared = None, False
        # names of positional arguments after the hidden states
        self.positional = tuple(inspect.signature(self.float_class.forward).parameters)[2:]
        self.config = config_at(self.config, path, self._smallest, self.state_names)
        self.begin(self.config.quant)
        self.rounded = RoundedWeights()
        self.joined: dict[str, torch.Tensor | None] = {}
        self.declare(self._smallest, measure=False)
        self.let_clips_learn(trained)

    def _smallest(self, mode: Mode) -> Program:
        one = PackedSequences(rows=1, count=1)
        return self.program(one, mode, source=one if self.CROSS else None)

    def extra_repr(self) -> str:
        if self.departed:
            return f"its own code, since {self.departed}"
        rounds = self.quant.quantized and not self.schedule.float_fallback
        return f"one program in {'int8' if rounds else 'floats'}"

    # Parameters, which inner modules hold

    def take_parameters(self, every: Iterable[Parameter]) -> None:
        every = list(every)
        super().take_parameters(one for one in every if not self._is_held(one.name))
        for one in every:
            self.declared[one.name] = one

    def state_name(self, name: str) -> str:
        return name.replace(".", "_")

    def state_names(self, name: str) -> Sequence[str]:
        return self.SOURCES.get(name) or super().state_names(name)

    def _holder(self, path: str) -> tuple[nn.Module, str]:
        return self, self.state_name(path)

    def _is_held(self, name: str) -> bool:
        return name in self.SOURCES or name in self.adapted.sources

    def holders(self, name: str) -> Iterator[tuple[str, nn.Module, str]]:
        """Yield (path, module, name in the module) of each parameter that `name` joins."""
        paths = self.SOURCES.get(name)
        for path in paths or self.adapted.sources[name]:
            inside, _, last = path.rpartition(".")
            holder = module_at(self, inside)
            yield path, base_of(holder) if paths else holder, last

    def sources(self, name: str) -> list[torch.Tensor]:
        """Return the parameters that `name` joins; ValueError if a module was replaced."""
        if not self._is_held(name):
            return [self.own_parameter(name)]
        parameters = []
        for path, holder, last in self.holders(name):
            if holder._parameters.get(last) is None:
                raise ValueError(
                    f"{path} of this {type(self).__name__} is gone: adapters, pruning or a"
                    f" parametrization have taken its place in a {type(holder).__name__}. Put them"
                    " in before lsq.convert, convert with fused=False, or call lsq.revert(model)"
                )
            parameters.append(holder._parameters[last])
        return parameters

    def own_parameter(self, name: str) -> torch.Tensor:
        if not self._is_held(name):
            return self._parameters[self.state_name(name)]
        parts = self.sources(name)
        if name in self.adapted.blocks:
            rows, blocks = self.adapted.blocks[name]
            return block_matrix(parts, blocks, rows)
        if len(parts) == 1:
            return parts[0]
        coded = CodedWeight.joined(parts)
        return Joined.apply(self.joined.get(name), *parts) if coded is None else coded

    def forget_floats(self, name: str) -> None:
        super().forget_floats(name)
        self.joined.pop(name, None)
        self.rounded.kept.pop(name, None)

    def __getstate__(self):
        return {**super().__getstate__(), "joined": {}}  # a copy has other parameters

    def finish_conversion(self, check: bool) -> None:
        self.compared = not check
        self.join()

    def join(self) -> None:
        """Move parameters that are one in programs together in memory."""
        for name in self.SOURCES:
            if name in self.declared:
                self.joined[name] = lie_together(self.sources(name))

    def _apply(self, *arguments, **options):
        super()._apply(*arguments, **options)
        self.join()
        return self

    def _drop_codes(self) -> None:
        super()._drop_codes()
        self.rounded.kept.clear()

    def mode_of(self, inputs: Mapping[str, torch.Tensor]) -> Mode:
        return super().mode_of({name: inputs[name] for name in TRAINED_INPUTS if name in inputs})

    def _trains(self, name: str) -> bool:
        return any(parameter.requires_grad for parameter in self.sources(name))

    # Passes

    def forward(self, hidden_states: torch.Tensor, *arguments, **options):
        """Run the program, or the layer's own code if the program does not fit the pass."""
        options.update(zip(self.positional, arguments, strict=False))
        cache = cache_of(options)
        packing = self.packing(hidden_states, options.get("attention_mask"), options, cache)
        side = None if packing is None else self.side_inputs(options)
        if side is None:
            return self.own_pass(hidden_states, **options)
        return self.fused(hidden_states, packing, cache=cache, **side)

    def side_inputs(self, options: Mapping[str, object]) -> dict[str, object] | None:
        """Read fields of SideInputs from a pass's options; None: the program does not fit."""
        if not self.CROSS:
            return {}
        states = options.get("encoder_hidden_states")
        if states is None:
            return None
        source = self.encoder_packing(states, options.get("encoder_attention_mask"))
        return None if source is None else {"states": states, "source": source}

    def program(
        self,
        sentences: PackedSequences,
        mode: Mode,
        *,
        source: PackedSequences | None = None,
        positions: int | None = None,
        heads: bool = False,
    ) -> Program:
        """Build the layer's program.

        `source`: sizes of encoder output. `positions`: rows of the rotary table. `heads`: output
        queries, keys and values, too.
        """
        if source is not None:
            return programs.decoder_layer(self.config, sentences, source, mode)
        config = _with_positions(self.config, positions)
        return programs.encoder_layer(config, sentences, mode, causal=self.causal, heads=heads)

    @beside_the_graph
    def packing(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, object],
        cache: object = None,
    ) -> Packing | None:
        """Return the Packing of x [B, T, H] under a mask of the model.

        Returns None if the program cannot compute the pass: an unusual mask, a filled cache,
        probabilities of attention asked for, a changed layer. `options`: of the pass. `cache`: of
        keys and values; training passes with gradients do not fill it. Raises ValueError if such a
        pass got this cache before, or an inner module has another class than before.
        """
        if self._departs() or any(
            options[name] is not None for name in ATTENTION_OPTIONS & options.keys()
        ):
            return None

        def pack(mask: torch.Tensor | None) -> Packing | None:
            options = {"window": self.config.window, **packing_options(self)}
            return packing_of(mask, tuple(x.shape[:2]), causal=self.causal, **options)

        if not x.numel():  # transformers' own layers cannot take it
            return pack(None)
        begins = cache is None or self._begins(cache)
        if mask is None:
            whole = self._hides(x.shape[1])
        else:
            whole = isinstance(mask, torch.Tensor) and mask.shape[-1] == x.shape[1]
        if not (begins and whole) or _attention_is_recorded():
            return None
        packing = pack(mask)
        return None if packing is not None and not packing.rows and self._fills(cache) else packing

    def _departs(self) -> bool:
        """Read settings; return whether the layer's own code must run; warn of each new reason."""
        reason = self._departure()
        if reason and reason != self.departed:
            self._refuse_split()
            warnings.warn(
                f"a {type(self).__name__} runs its own code in the place of its program, since"
                f" {reason}; lsq.revert(model) and lsq.convert(model) look at the model anew",
                stacklevel=2,
            )
        self.departed = reason
        return reason is not None

    def _refuse_split(self) -> None:
        """Raise ValueError if torch's `parallelize_module` has split a module inside."""
        for path, module in named_inside(self):
            if "_distribute_module_applied" in vars(module):
                raise ValueError(
                    f"parallelize_module has split {path} of a {type(self).__name__}, which is one"
                    " program for all heads: split the linear layers of lsq.convert(model,"
                    " fused=False), or leave this layer out of the plan"
                )

    def _take_adapters(self, adapters: Adapted) -> None:
        self.adapted = adapters
        self.config = dataclasses.replace(self.config, adapters=adapters.adapters)

    def _read_adapters(self) -> None:
        """Read adapters again if they have changed; after an error the former ones stay."""
        now, before = adapted(self, self.SOURCES), self.adapted
        if now == before:
            return
        self._take_adapters(now)
        try:
            program = self._smallest(
                Mode(training=True, backward=True, backend=backend("reference"))
            )
        except ValueError:
            self._take_adapters(before)
            raise
        for name in [name for name, one in self.declared.items() if one.kind is Kind.ADAPTER]:
            del self.declared[name]
        self.take_parameters(virtual.declared for virtual in program.parameters)

    def _departure(self) -> str | None:
        modules = list(named_inside(self))
        if [type(module) for _, module in modules] != list(self.kinds.values()):
            self._refuse({path: type(module) for path, module in modules})
        for path, module in modules:
            change = patched_now(type(module), type(module).forward) or altered(module)
            if change:
                return f"its {path} has {change}"
            if module.training is not self.training:
                mode, other = ("training", "eval") if module.training else ("eval", "training")
                return f"its {path} is in {mode} mode, and the layer in {other} mode"
        kind = self.float_class
        change = patched_now(kind, kind.forward) or own_methods(self, kind) or hooked_everywhere()
        if change:
            return f"it has {change}"
        try:
            self._check_attention(self)
            self._read_adapters()
            now = self.settings(self)
            if any(getattr(self.config, name) != value for name, value in now.items()):
                self.config = dataclasses.replace(self.config, **now)
        except ValueError as error:
            return str(error)
        return None

    def _refuse(self, now: Mapping[str, type[nn.Module]]) -> None:
        path = next(
            path for path in (*self.kinds, *now) if now.get(path) is not self.kinds.get(path)
        )
        before, after = (
            f"a {kind.__module__}.{kind.__qualname__}" if kind else "not there"
            for kind in (self.kinds.get(path), now.get(path))
        )
        raise ValueError(
            f"{path} of this {type(self).__name__} was {before} when it was converted, and is"
            f" {after} now. Add adapters and wrappers before lsq.convert, or convert with"
            " fused=False"
        )

    def _hides(self, time: int) -> bool:
        """Whether the layer's own attention without a mask hides the same keys as the program."""
        if not self.causal or time < 2:
            return True
        if self.attention_kind == "sdpa":
            return self.config.window is None or time <= self.config.window
        return self.attention_kind.startswith("flash")

    def _begins(self, cache: object) -> bool:
        """Whether the program may run with this cache: an empty one, filled unless training."""
        if cache.get_seq_length(self._number):
            return False
        unfilled = vars(cache).setdefault(UNFILLED, set())
        if self._number in unfilled and not recomputing():
            raise ValueError(
                "this cache was given to a training pass, which does not fill it; decode in eval"
                " mode or under torch.no_grad() from the beginning"
            )
        if self._fills(cache):
            return True
        # a pass may run without gradients to measure clips
        measures = self.training and self.calibration_due()
        program = self.training and torch.is_grad_enabled() or measures
        if program:
            unfilled.add(self._number)
        return program

    def _fills(self, cache: object) -> bool:
        return (
            cache is not None and not (self.training and torch.is_grad_enabled()) and not self.CROSS
        )

    @beside_the_graph
    def encoder_packing(self, states: torch.Tensor, mask: torch.Tensor | None) -> Packing | None:
        """Return the Packing of encoder output [B, S, H]; None: no program takes this mask."""
        return encoder_packing_of(mask, tuple(states.shape[:2]), **packing_options(self))

    @beside_the_graph
    def fused(
        self, x: torch.Tensor, packing: Packing, *, cache: object = None, **side_inputs
    ) -> torch.Tensor:
        """Run the program: x [B, T, H] -> [B, T, H], zero in padding.

        `cache`: an empty one, which passes fill unless they train. `side_inputs`: see SideInputs.
        """
        side = SideInputs(**side_inputs)
        if not packing.rows:
            read = [tensor for tensor in (side.states, side.bias) if tensor is not None]
            return packing.unpack(self.reached(packing.pack(x)[:0], *read))
        if not self.compared:
            self.compared = self._compare(x, side)
        inputs, sizes = self.inputs(x, packing, side)
        mode, fills = self.mode_of(inputs), self._fills(cache)
        build = partial(self.program, packing.sentences, **sizes)
        y, *heads = self.execute(build(mode, heads=fills and not mode.backward), inputs)
        if fills and mode.backward:  # programs with a backward pass output no heads
            with torch.no_grad():
                _, *heads = self.execute(build(self.mode_of(inputs), heads=True), inputs)
        if fills:
            self._fill(cache, packing, x.dtype, y, *heads)
        # activations of bfloat16 models may exceed float16; transformers' layers clamp, too
        if x.dtype == torch.float16:
            y = y.clamp(*FLOAT16)
        return packing.unpack(y).to(x.dtype)

    def inputs(
        self, x: torch.Tensor, packing: Packing, side: SideInputs
    ) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        """Return the inputs of a program by name, and further arguments of `program`."""
        inputs = {"x": packing.pack(x), "cu_seqlens": packing.cu_seqlens}
        source = positions = None
        if side.source is not None:
            source = side.source.sentences
            inputs["memory"] = side.source.pack(side.states)
            inputs["memory_cu_seqlens"] = side.source.cu_seqlens
        if side.rotation is not None:
            inputs["rotation"], inputs["positions"] = rotation_of(*side.rotation, packing)
            positions = len(inputs["rotation"])
        else:
            inputs |= position_inputs(
                self.config,
                packing.positions,
                packing.shape[1],
                causal=self.causal,
                table=side.bias,
            )
        return inputs, {"source": source, "positions": positions}

    def original(
        self, x: torch.Tensor, mask: torch.Tensor | None, side: SideInputs
    ) -> torch.Tensor:
        """Run the layer's own code on its weights as they are; `mask` is added to scores."""
        return self.float_class.forward(self, x, attention_mask=mask)

    def _compare(self, x: torch.Tensor, side: SideInputs) -> bool:

        def original(x: torch.Tensor) -> torch.Tensor:
            mask, first = None, side.first(x.shape[1], self.target)
            if self.causal:
                present = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
                hidden = ~visible(present, causal=True, window=self.config.window)
                scores = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device)
                mask = scores.masked_fill(hidden, torch.finfo(x.dtype).min)[:, None]
            return self.original(x, mask, first)

        def program(x: torch.Tensor) -> torch.Tensor:
            packing = Packing(shape=tuple(x.shape[:2]), backend=self.target)
            inputs, sizes = self.inputs(x, packing, side.first(x.shape[1], self.target))
            mode = Mode(training=False, backward=False, backend=backend("reference"))
            program = in_floats(self.program(packing.sentences, mode, **sizes))
            inputs |= {
                virtual.name: self.own_parameter(virtual.name) for virtual in program.parameters
            }
            unused = torch.zeros(1, dtype=torch.int64, device=x.device)
            return Execution(program, mode.backend)({"random_key": unused, **inputs})[0]

        return compare(self, x, self.attention_kind, original, program)

    @property
    def _number(self) -> int:
        return self.attends(self).layer_idx

    def _fill(
        self,
        cache: object,
        packing: Packing,
        dtype: torch.dtype,
        y: torch.Tensor,
        heads: torch.Tensor,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Put keys and values of `heads` [M, ...] (queries, keys, values) into a cache."""
        values = (heads if scale is None else heads * scale).to(dtype)
        if y.requires_grad:  # a backward pass through the cache raises an error
            values = torch._C._functions.DelayedError(UNDIFFERENTIATED, 1)(values.requires_grad_())
        columns = [self.config.query_columns, self.config.key_columns, self.config.key_columns]
        _, *both = packing.unpack(values).split(columns, dim=2)
        keys, values = (one.unflatten(2, (self.config.of_keys, -1)).transpose(1, 2) for one in both)
        cache.update(keys, values, self._number)

    def own_pass(self, x: torch.Tensor, *arguments, **options):
        """Run the layer's own code, on weights as the program rounds them."""
        if self.training and torch.is_grad_enabled() and self.departed is None:
            warnings.warn(
                f"a {type(self).__name__} runs its own code in a training pass: its program cannot"
                " take the mask, the cache or an option of this pass",
                stacklevel=2,
            )
        with self.rounded.within(self, rows=x.shape[:-1].numel()):
            return self.float_class.forward(self, x, *arguments, **options)


def _attention_is_recorded() -> bool:
    """Whether transformers collects probabilities of attention by hooks on modules."""
    capturing = sys.modules.get(RECORDER)  # None if transformers is not used
    return capturing is not None and not ATTENTIONS.isdisjoint(
        capturing._active_collector.get() or ()
    )


def cache_of(options: Mapping[str, object]) -> object:
    """Return the cache in a pass's options: `cache` from transformers 5.24 on."""
    return options.get("cache", options.get("past_key_values"))


@lru_cache(maxsize=256)
def _with_positions(config: LayerConfig, positions: int | None) -> LayerConfig:
    if positions is None:
        return config
    return dataclasses.replace(
        config, rotary=dataclasses.replace(config.rotary, positions=positions)
    )
