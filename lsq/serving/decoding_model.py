"""A model for decoding: its architecture and its tensors by name, rounded weights as codes alone.

Names are as in a state dict: `decoder.layers.0.self_attn.qkv_bias`. A rounded weight W is stored as
W.codes int8, packed as in its format, and W.scale float32, one for each row. They are the same
numbers that the modules compute with. Weights may have different formats.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lsq.layers import Embedding, VocabularyProjection, programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.decoding import check_ready
from lsq.layers.module import ProgramModule
from lsq.layers.programs import Mode
from lsq.ops.rounding import RoundWeight
from lsq.program.program import Program
from lsq.program.tensor import Kind
from lsq.program.values import Weight
from lsq.quant.formats import WeightFormat, format_choice
from lsq.run.backends import Backend, backend
from lsq.serving.architecture import Architecture, StackArchitecture, check_codes
from lsq.serving.stored_codes import WholeCodes, as_int8, format_of, mix_of

Spec = tuple[tuple[int, ...], torch.dtype]
PROJECTION = "output_projection"
EMBEDDING = "embed_tokens"


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodingModel:
    """Architecture and tensors of a trained model for decoding; ValueError if a tensor is missing,
    unknown, or has another shape or dtype."""

    architecture: Architecture
    tensors: Mapping[str, Tensor]
    """Contiguous tensors on the CPU; their memory may be a mapped file."""

    def __post_init__(self) -> None:
        wanted = tensors_of(self.architecture)
        missing, unknown = set(wanted) - set(self.tensors), set(self.tensors) - set(wanted)
        for problem, names in (("lacks", missing), ("has unknown", unknown)):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise ValueError(
                    f"the model {problem} tensors: {', '.join(sorted(names)[:3])}{more}"
                )
        for name, (shape, dtype) in wanted.items():
            tensor = self.tensors[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be a contiguous"
                    f" tensor of {dtype} {shape}"
                )

    def words(self, side: str) -> Tensor:
        """Return the table of words of "encoder" or "decoder", float32 [V, H]."""
        holder = "decoder" if self.architecture.shared_words else side
        return self.tensors[f"{holder}.{EMBEDDING}.weight"]

    def codes(self, name: str, columns: int) -> Tensor:
        """Return the codes of a rounded weight, unpacked for products, int8 [N, columns]."""
        form = self.architecture.format_of(name)
        return form.unpack(self.tensors[name + ".codes"], columns)


def tensors_of(architecture: Architecture) -> dict[str, Spec]:
    """Return name -> (shape, dtype) of each tensor of a model, in the order of computing."""
    specs: dict[str, Spec] = {}
    for side, stack in architecture.stacks.items():
        for prefix, program in _programs(architecture, side, stack):
            own = dict(_specs(architecture, f"{side}.{prefix}.", program))
            if side == "encoder" and prefix == EMBEDDING and architecture.shared_words:
                del own[f"{side}.{prefix}.weight"]
            specs |= own
        norms = []
        if stack.embedding_norm:
            norms += [f"{EMBEDDING}.layer_norm.weight", f"{EMBEDDING}.layer_norm.bias"]
        if stack.final_norm:
            norms += ["layer_norm.weight", "layer_norm.bias"][: 1 + (stack.config.norm == "layer")]
        specs |= {f"{side}.{name}": ((stack.config.hidden,), torch.float32) for name in norms}
    return specs


def _programs(
    architecture: Architecture, side: str, stack: StackArchitecture
) -> Iterator[tuple[str, Program]]:
    """Yield (name of a module of the stack, a program that declares all its parameters)."""
    mode = Mode(training=False, backward=False, backend=backend("reference"))
    config = replace(stack.config, quant=as_int8(stack.config.quant))
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
    attends_to_encoder = side == "decoder" and architecture.encoder is not None
    for index in range(stack.layers):
        if attends_to_encoder:
            yield f"layers.{index}", programs.decoder_layer(config, one, one, mode)
        else:
            yield f"layers.{index}", programs.encoder_layer(config, one, mode)
    if side == "decoder":
        sizes = stack.words, config.hidden
        yield PROJECTION, programs.vocabulary_logits(config.quant, 1, *sizes, mode)


def _specs(architecture: Architecture, prefix: str, program: Program) -> Iterator[tuple[str, Spec]]:
    """Yield (name, shape and dtype) of parameters without clips; weights have codes and scale."""
    for virtual in program.parameters:
        name, kind = prefix + virtual.name, virtual.declared.kind
        if kind is Kind.WEIGHT:
            weight, form = program.weights[virtual.name], architecture.format_of(name)
            rows, columns = weight.codes.shape
            yield name + ".codes", ((rows, form.stored_columns(columns)), form.storage)
            yield name + ".scale", (weight.scale.shape, weight.scale.dtype)
        elif kind is not Kind.WEIGHT_CLIP:
            yield name, (virtual.shape, virtual.dtype)


@torch.no_grad()
def model_of(module: nn.Module) -> DecodingModel:
    """Make the decoding model of a trained module, with the integers that it computes with.

    Args:
        module: in eval mode, with a `decoder`, and an `encoder` if it translates, as
            LSQTransformerModel and LSQTransformerLanguageModel have them.

    Raises:
        ValueError: it is in training or float mode; its clips were never measured; a weight has
            a format that cannot be kept as codes; its dictionaries differ in the padding; or its
            final norm is of another kind than the norms of its layers.
    """
    encoder, decoder = getattr(module, "encoder", None), module.decoder
    for each in module.modules():
        if isinstance(each, ProgramModule):
            check_ready(each)
            each.bring_clips_up()
    _check_gates(module)
    shared = encoder is not None and encoder.embed_tokens.weight is decoder.embed_tokens.weight
    words = decoder.dictionary
    if encoder is not None and encoder.padding_idx != decoder.padding_idx:
        raise ValueError(
            f"padding is word {encoder.padding_idx} of the source and {decoder.padding_idx} of the"
            " target; both dictionaries must agree"
        )
    architecture = Architecture(
        encoder=None if encoder is None else _architecture("encoder", encoder),
        decoder=_architecture("decoder", decoder),
        shared_words=shared,
        tied_projection=decoder.output_projection.weight is decoder.embed_tokens.weight,
        padding=decoder.padding_idx,
        bos=words.bos(),
        eos=words.eos(),
        unk=words.unk(),
    )
    tensors = {} if encoder is None else _tensors("encoder", encoder)
    tensors |= _tensors("decoder", decoder)
    kept = {name: tensors[name] for name in tensors_of(architecture)}
    return DecodingModel(architecture=architecture, tensors=kept)


def _check_gates(module: nn.Module) -> None:
    """Raise ValueError if only some clips of a model with gates learn: they round gated products
    by rows, or not."""
    modules = [each for each in module.modules() if isinstance(each, ProgramModule)]
    learned = {each.quant.learned for each in modules if each.quant.quantized}
    if len(learned) > 1 and module.decoder.layers[0].config.gated:
        raise ValueError(
            'clips is "auto", by which those of some layers learn and others do not; gated models'
            ' that are kept as codes need one kind: train with clips="learned"'
        )


def _formats(side: str, stack: nn.Module) -> dict[str, str]:
    """Return the format of each weight by name; ValueError if it cannot be kept as codes."""
    formats = {}
    for path, module in stack.named_modules():
        if isinstance(module, ProgramModule) and module.quant.quantized:
            for name in module.tensor_names[0]:
                weight = f"{side}.{path}.{name}"
                form = format_choice(module.quant.weight_format).of(name)
                check_codes(replace(module.quant, weight_format=form), weight)
                formats[weight] = form
    return formats


def _architecture(side: str, stack: nn.Module) -> StackArchitecture:
    embedding: Embedding = stack.embed_tokens
    norm, config = stack.layer_norm, stack.layers[0].config
    wanted = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    if norm is not None and not isinstance(norm, wanted):
        raise ValueError(
            f"the final norm is a {type(norm).__name__} behind layers of another norm; use"
            f" {wanted.__name__}"
        )
    dropouts = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    quant, formats = replace(config.quant, sparsity=""), _formats(side, stack)
    if formats:
        quant = replace(quant, weight_format=mix_of(formats))
    config = replace(config, **dropouts, quant=quant)
    return StackArchitecture(
        config=config,
        layers=len(stack.layers),
        words=len(embedding.weight),
        max_positions=embedding.max_positions,
        positions="learned" if embedding.learned else "sinusoidal",
        embedding_scale=float(embedding.scale),
        embedding_norm=embedding.layer_norm is not None,
        final_norm=norm is not None,
    )


def _tensors(side: str, stack: nn.Module) -> dict[str, Tensor]:
    tensors = {}
    for path, module in stack.named_modules():
        prefix = f"{side}.{path}." if path else f"{side}."
        if isinstance(module, ProgramModule):
            for name, declared in module.declared.items():
                values = module.values_of(name).detach()
                if declared.clip is None:
                    tensors[prefix + name] = values
                    continue
                rows = len(values)
                if isinstance(module, VocabularyProjection):
                    rows = programs.padded_words(as_int8(module.quant), rows)
                clip = module.own_parameter(declared.clip).detach()
                form = format_of(module.quant, name)
                weight = round_weight(values, clip, form, module.target, rows)
                tensors[f"{prefix}{name}.codes"] = weight.codes
                tensors[f"{prefix}{name}.scale"] = weight.scale
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            tensors |= {prefix + name: parameter for name, parameter in module.named_parameters()}
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }


def round_weight(
    values: Tensor, clip: Tensor, form: WeightFormat, target: Backend, rows: int | None = None
) -> Weight:
    """Round floats [N, K] under clips, as modules do, into codes and scales of `rows` rows or N."""
    rows = rows or len(values)
    weight = Weight(
        format=form,
        values=values,
        clip=clip,
        codes=target.allocate((rows, form.stored_columns(values.shape[1])), form.storage),
        scale=target.allocate((rows,), torch.float32),
    )
    if isinstance(form, WholeCodes):
        padded = torch.nn.functional.pad(values.float(), (0, 0, 0, rows - len(values)))
        clips = (
            clip
            if len(clip) == 1
            else torch.nn.functional.pad(clip, (0, rows - len(clip)), value=1.0)
        )
        codes, scale = form.encode(padded, clips)
        weight.codes.copy_(codes), weight.scale.copy_(scale)
    else:
        target.run(RoundWeight(weight=weight))
    return weight
