"""A model as it is decoded: its architecture and plain tensors by name, without floats of what is
rounded.

Names are those of a state dict, `decoder.layers.0.self_attn.qkv_bias`; a rounded weight W stands as
W.codes int8, as its format stores them, and W.scale float32 for each row. These are the integers
that the modules compute with.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lsq.config.quantization import FAST_FORMATS
from lsq.layers import Embedding, VocabularyProjection, programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.clip_format import option
from lsq.layers.decoding import check_ready
from lsq.layers.module import ProgramModule
from lsq.layers.programs import Mode
from lsq.ops.rounding import RoundWeight
from lsq.program.parameters import Kind
from lsq.program.program import Program
from lsq.program.values import Weight
from lsq.run.backends import backend
from lsq.serving.decode.architecture import Architecture, StackArchitecture

Spec = tuple[tuple[int, ...], torch.dtype]
"""(shape, dtype) of a tensor."""
PROJECTION = "output_projection"
EMBEDDING = "embed_tokens"


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodingModel:
    """Everything that decoding needs of a trained model.

    Raises:
        ValueError: a tensor is missing, unknown, or has another shape or dtype.
    """

    architecture: Architecture
    tensors: Mapping[str, Tensor]
    """On the CPU, contiguous; their memory may be a mapped file."""

    def __post_init__(self) -> None:
        wanted = tensors_of(self.architecture)
        missing, unknown = set(wanted) - set(self.tensors), set(self.tensors) - set(wanted)
        for problem, names in (("lacks", missing), ("has unknown", unknown)):
            if names:
                listed = ", ".join(sorted(names)[:3]) + (
                    f" and {len(names) - 3} more" if len(names) > 3 else ""
                )
                raise ValueError(f"the model {problem} tensors: {listed}")
        for name, (shape, dtype) in wanted.items():
            found = self.tensors[name]
            if tuple(found.shape) != shape or found.dtype != dtype or not found.is_contiguous():
                raise ValueError(
                    f"{name} is {found.dtype} {tuple(found.shape)}; it must be a contiguous tensor"
                    f" of {dtype} {shape}"
                )

    def words(self, side: str) -> Tensor:
        """float32 [V, H], what "encoder" or "decoder" looks words up in."""
        holder = "decoder" if self.architecture.shared_words else side
        return self.tensors[f"{holder}.{EMBEDDING}.weight"]

    def codes(self, name: str, columns: int) -> Tensor:
        """int8 [N, columns], the codes of a rounded weight as products read them."""
        form = self.architecture.decoder.config.quant.weights
        return form.unpack(self.tensors[name + ".codes"], columns)

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def tensors_of(architecture: Architecture) -> dict[str, Spec]:
    """What each tensor of such a model is, by name, in the order of computing."""
    found: dict[str, Spec] = {}
    for side, stack in architecture.stacks.items():
        for prefix, program in _programs(architecture, side, stack):
            specs = dict(_specs(program))
            if side == "encoder" and prefix == EMBEDDING and architecture.shared_words:
                del specs["weight"]
            found |= {f"{side}.{prefix}.{name}": spec for name, spec in specs.items()}
        norms = [(f"{EMBEDDING}.layer_norm", stack.embedding_norm, True)]
        norms.append(("layer_norm", stack.final_norm, stack.config.norm == "layer"))
        for name, there, with_bias in norms:
            for part in ("weight", "bias")[: (1 + with_bias) if there else 0]:
                found[f"{side}.{name}.{part}"] = (stack.config.hidden,), torch.float32
    return found


def _programs(
    architecture: Architecture, side: str, stack: StackArchitecture
) -> Iterator[tuple[str, Program]]:
    """(name of a module in the stack, a program with everything that it declares)."""
    mode, config = Mode(training=False, backward=False, backend=backend("reference")), stack.config
    one = PackedSequences(rows=1, count=1)
    table = programs.Table(
        vocabulary=stack.words,
        hidden=config.hidden,
        positions=stack.max_positions + architecture.padding + 1,
        padding=architecture.padding,
        scale=stack.embedding_scale,
        dropout=0.0,
        learned=stack.positions == "learned",
    )
    yield EMBEDDING, programs.embedding(replace(config.quant, mode="float"), 1, table, mode)
    with_memory = side == "decoder" and architecture.encoder is not None
    for index in range(stack.layers):
        layer = (
            programs.decoder_layer(config, one, one, mode)
            if with_memory
            else programs.encoder_layer(config, one, mode)
        )
        yield f"layers.{index}", layer
    if side == "decoder":
        sizes = programs.Vocabulary(
            words=stack.words, hidden=config.hidden, padded=stack.padded_words
        )
        yield PROJECTION, programs.vocabulary_logits(config.quant, 1, sizes, mode)


def _specs(program: Program) -> Iterator[tuple[str, Spec]]:
    """What is kept of a program's parameters: codes and scales of those that are rounded, and the
    others."""
    for virtual in program.parameters:
        name, kind = virtual.name, virtual.declared.kind
        if kind is Kind.WEIGHT:
            weight = program.weights[name]
            yield name + ".codes", (weight.codes.shape, weight.codes.dtype)
            yield name + ".scale", (weight.scale.shape, weight.scale.dtype)
        elif kind is not Kind.WEIGHT_CLIP:
            yield name, (virtual.shape, virtual.dtype)


@torch.no_grad()
def model_of(module: nn.Module) -> DecodingModel:
    """The model of a trained module, with its integers.

    Args:
        module: has a `decoder`, and an `encoder` if it translates, as LSQTransformerModel and
            LSQTransformerLanguageModel have: `dictionary`, `embed_tokens`, `layers`, `layer_norm`,
            and the decoder `output_projection`. In eval mode.

    Raises:
        ValueError: it is in training mode or in float mode, its clips were never measured, its
            layers are in different formats, or its final norm is of another kind than those of its
            layers.
    """
    encoder, decoder = getattr(module, "encoder", None), module.decoder
    for each in module.modules():
        if isinstance(each, ProgramModule):
            check_ready(each)
            each.bring_clips_up()
    _check_alike(module)
    shared = encoder is not None and encoder.embed_tokens.weight is decoder.embed_tokens.weight
    words, projection = decoder.dictionary, decoder.output_projection
    if encoder is not None and encoder.padding_idx != decoder.padding_idx:
        raise ValueError(
            f"padding is word {encoder.padding_idx} of the source and {decoder.padding_idx} of the"
            " target; "
            "both dictionaries must agree"
        )
    architecture = Architecture(
        encoder=None if encoder is None else _architecture(encoder),
        decoder=_architecture(decoder),
        shared_words=shared,
        tied_projection=projection.weight is decoder.embed_tokens.weight,
        padding=decoder.padding_idx,
        bos=words.bos(),
        eos=words.eos(),
        unk=words.unk(),
    )
    found = {} if encoder is None else dict(_tensors("encoder", encoder))
    found |= _tensors("decoder", decoder)
    return DecodingModel(
        architecture=architecture, tensors={name: found[name] for name in tensors_of(architecture)}
    )


def _check_alike(module: nn.Module) -> None:
    """Refuse layers in different formats, as patterns of names give them."""
    rounding = {
        path: each.quant
        for path, each in module.named_modules()
        if isinstance(each, ProgramModule) and each.quant.quantized
    }
    for field in FAST_FORMATS:
        first = {getattr(quant, field): path for path, quant in reversed(rounding.items())}
        if len(first) > 1:
            listed = ", ".join(f"{form} in {path}" for form, path in sorted(first.items()))
            raise ValueError(
                f"{field} differs between layers ({listed}); models that are kept as codes have one"
                " format: lsq "
                f"convert-checkpoint CHECKPOINT --output OTHER {option(field)} int8"
            )


def _architecture(stack: nn.Module) -> StackArchitecture:
    embedding: Embedding = stack.embed_tokens
    norm, wanted = (
        stack.layer_norm,
        nn.RMSNorm if stack.layers[0].config.norm == "rms" else nn.LayerNorm,
    )
    if norm is not None and not isinstance(norm, wanted):
        given = type(norm).__name__
        raise ValueError(
            f"the final norm is a {given} behind layers of another norm; use {wanted.__name__}"
        )
    config = stack.layers[0].config
    config = replace(
        config,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        quant=replace(config.quant, sparsity=""),
    )
    return StackArchitecture(
        config=config,
        layers=len(stack.layers),
        words=len(embedding.weight),
        max_positions=embedding.max_positions,
        positions="learned" if embedding.learned else "sinusoidal",
        embedding_scale=float(embedding.scale),
        embedding_norm=embedding.layer_norm is not None,
        final_norm=stack.layer_norm is not None,
    )


def _tensors(side: str, stack: nn.Module) -> dict[str, Tensor]:
    """Copies of everything in a stack that is kept, on the CPU, by name."""
    found = {}
    for path, module in stack.named_modules():
        prefix = f"{side}.{path}." if path else f"{side}."
        if isinstance(module, ProgramModule):
            for name, declared in module.declared.items():
                if declared.clip is None:
                    found[prefix + name] = module.values_of(name)
                else:
                    weight = _rounded(module, name, declared.clip)
                    found |= {
                        f"{prefix}{name}.codes": weight.codes,
                        f"{prefix}{name}.scale": weight.scale,
                    }
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            found |= {prefix + name: parameter for name, parameter in module.named_parameters()}
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in found.items()
    }


def _rounded(module: ProgramModule, name: str, clip: str) -> Weight:
    """The codes of one weight, as the module makes them when it runs."""
    values, form, place = module.values_of(name).detach(), module.quant.weights, module.target
    rows = module.padded if isinstance(module, VocabularyProjection) else len(values)
    weight = Weight(
        format=form,
        values=values,
        clip=module.own_parameter(clip).detach(),
        codes=place.allocate((rows, form.stored_columns(values.shape[1])), form.storage),
        scale=place.allocate((rows,), torch.float32),
    )
    place.run(RoundWeight(weight=weight))
    return weight
