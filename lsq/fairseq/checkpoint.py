"""Checkpoints of fairseq: starting from float models, checking models of lsq, reading options."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.models.transformer import TransformerConfig
from torch import Tensor, nn

from lsq import quant
from lsq.config import QuantConfig
from lsq.config.quantization import CONSTANT, RENAMED, of_trained
from lsq.layers import ProgramModule, clip_format, weight_masks
from lsq.models.sparsity import wants_sparsity
from lsq.observe import quantized_tensors

_SAME = """
    activation_fn encoder_attention_heads decoder_attention_heads encoder_learned_pos
    decoder_learned_pos encoder_normalize_before decoder_normalize_before layernorm_embedding
    no_scale_embedding
""".split()
"""Options under which the same parameters compute something else: two models must agree on them."""
PREFIX = "lsq_"
"""Prefix of QuantConfig's fields in fairseq's namespaces."""
MASK = weight_masks.SUFFIX
CLIP = "_clip"
"""Endings of the names of masks of weights (MASK) and of clips."""
LAST = "checkpoint_last.pt"
"""fairseq's name of the checkpoint in --save-dir to go on from; any other name is a path."""


# lsq joins the projections of self-attention (query, key, value), and of cross-attention (key,
# value), in one weight
_RENAMED = (
    ("embed_positions.weight", "embed_tokens.position_weight"),
    ("layernorm_embedding.", "embed_tokens.layer_norm."),
    (".self_attn.out_proj.", ".self_attn.out_"),
    (".encoder_attn.out_proj.", ".encoder_attn.out_"),
    (".encoder_attn.q_proj.", ".encoder_attn.query_"),
    (".fc1.", ".feed_forward.fc1_"),
    (".fc2.", ".feed_forward.fc2_"),
)
"""Parts of names: (fairseq's, ours)."""
_JOINED = (
    (".self_attn.{}_proj.", "qkv", ".self_attn.qkv_"),
    (".encoder_attn.{}_proj.", "kv", ".encoder_attn.key_value_"),
)
"""(part of fairseq's name, letters of the projections in order, part of our name)"""
_CONSTANT = re.compile(r"(en|de)coder\.(version|embed_positions\._float_tensor)")
"""Names in fairseq's checkpoints that are not parameters."""


def rename(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename parameters of fairseq's transformer as in lsq, and join projections into one weight.
    Unknown names stay. ValueError: a projection is missing, or shapes do not fit."""
    renamed: dict[str, Tensor] = {}
    joined: dict[tuple[str, str], dict[str, Tensor]] = defaultdict(dict)
    parts = {
        theirs.format(letter): (letter, letters, ours)
        for theirs, letters, ours in _JOINED
        for letter in letters
    }
    for name, tensor in state.items():
        if part := next((part for part in parts if part in name), None):
            letter, letters, ours = parts[part]
            joined[name.replace(part, ours), letters][letter] = tensor
        elif not _CONSTANT.fullmatch(name):
            for theirs, ours in _RENAMED:
                name = name.replace(theirs, ours)
            renamed[name] = tensor
    for (name, letters), tensors in joined.items():
        if missing := [letter for letter in letters if letter not in tensors]:
            raise ValueError(
                f"{name} needs the projections {', '.join(letters)} of fairseq's transformer, but"
                f" the checkpoint has no {', '.join(missing)}"
            )
        projections = [tensors[letter] for letter in letters]
        if len({one.shape[1:] for one in projections}) > 1 or not projections[0].dim():
            shapes = ", ".join(str(list(one.shape)) for one in projections)
            raise ValueError(
                f"{name} joins projections, whose shapes in the checkpoint do not fit: {shapes}"
            )
        renamed[name] = torch.cat(projections)
    return renamed


def our_name(name: str) -> str:
    """Return the name that `rename` gives a parameter of fairseq's transformer."""
    parts = [(theirs.format(one), ours) for theirs, letters, ours in _JOINED for one in letters]
    for theirs, ours in (*parts, *_RENAMED):
        name = name.replace(theirs, ours)
    return name


def restore(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo `rename`."""
    restored: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for theirs, letters, ours in _JOINED:
            if ours in name:
                names = [name.replace(ours, theirs.format(letter)) for letter in letters]
                restored |= zip(names, tensor.chunk(len(letters)), strict=True)
                break
        else:
            for theirs, ours in _RENAMED:
                name = name.replace(ours, theirs)
            restored[name] = tensor
    return restored


def load_float(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy the parameters of a float model, fairseq's or lsq's, with its masks applied. Clips of
    weights are measured on them; the next batch measures the clips of activations.

    Raises:
        ValueError: `state` has clips, or its parameters do not fit. The message lists all that are
            missing, unknown or of another shape; nothing is copied.
    """
    if any(name.endswith(CLIP) for name in state):
        raise ValueError(
            "--lsq-from was given an int8 model's checkpoint (it holds clips), but it starts from a"
            " float model; continue an int8 model with --restore-file or --finetune-from-model"
        )
    given = rename(weight_masks.without_masks(state))
    clips = {name + CLIP for name, _ in quantized_tensors(model)}
    own = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in clips
    }
    here, there = (
        {name: list(tensor.shape) for name, tensor in tensors.items()} for tensors in (own, given)
    )
    problems = [
        f"  {name}: {there.get(name, 'nothing')} in the checkpoint, {here.get(name, 'nothing')}"
        " here"
        for name in here | there
        if here.get(name) != there.get(name)
    ]
    first: dict[int, str] = {}
    for name, parameter in own.items():
        other = first.setdefault(id(parameter), name)
        if name in given and other in given and not torch.equal(given[name], given[other]):
            problems.append(
                f"  {name}: the same parameter as {other} here, but different values in the"
                " checkpoint"
            )
    if problems:
        raise ValueError(
            "the checkpoint does not fit this model; choose the architecture, the dictionaries and"
            " the sharing of embeddings that it was trained with:\n" + "\n".join(sorted(problems))
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(given[name])
    for module in model.modules():
        if isinstance(module, ProgramModule) and module.quant.quantized:
            module.calibrate_weights()
            module.schedule.restart()


def check_fits(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Raise ValueError for a checkpoint of this model that lacks clips, has clips for a float
    model, has a clip out of range, or is sparse where the model is dense."""
    wanted = any(True for _ in quantized_tensors(model))
    clips = sorted(name for name in state if name.endswith(CLIP))
    if wanted and not clips:
        raise ValueError(
            "the checkpoint holds no clips: it is a float model's. To start from its weights, train"
            " with --lsq-from CHECKPOINT; to use it as it is, with --lsq-mode float"
        )
    if clips and not wanted:
        raise ValueError(
            f"the checkpoint holds {len(clips)} clips: it is an int8 model's, but this model was"
            " made with --lsq-mode float; use --lsq-mode int8"
        )
    for name in clips:
        quant.check_clip(state[name], f"{name} in the checkpoint")
    if any(name.endswith(MASK) for name in state) and not wants_sparsity(model):
        raise ValueError(
            "the checkpoint is of a sparse model (it holds masks of weights), but this model was"
            " made dense; add --lsq-sparsity 2:4, or to train on without masks from the same"
            " weights --lsq-sparsity 2:4,end=1"
        )


def say_formats(state: dict[str, Tensor], path: str) -> None:
    """Add the formats of clips to `state` if an earlier version did not write them. They come from
    the options in the file at `path`."""
    counted = [name.removesuffix("calibrated") for name in state if name.endswith(".calibrated")]
    missing = [
        prefix
        for prefix in counted
        if prefix + clip_format.NAME not in state
        and not any(prefix != other and prefix.startswith(other) for other in counted)
    ]
    if missing:
        trained = quantization(options_in(Path(path), "model"))
        for prefix in missing:
            clip_format.save(state, prefix, trained)


def quantization(given: Mapping[str, Any]) -> QuantConfig:
    """Read QuantConfig from the options of a checkpoint; ValueError if a value is not allowed."""
    return QuantConfig(**of_trained(quantizer_fields(given)))


def quantizer_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of QuantConfig, of this version and of 0.1, among fairseq's options."""
    names = [*(field.name for field in fields(QuantConfig)), *CONSTANT, *RENAMED]
    return {name: given[PREFIX + name] for name in names if PREFIX + name in given}


def start_from(model: nn.Module, path: str, args: Any) -> None:
    """Load the float checkpoint at `path` into `model`, built from fairseq's options `args`.
    ValueError: it does not fit (see `load_float`), or was trained with other options of _SAME.
    Other errors are as in loading a checkpoint."""
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    before, now = map(TransformerConfig.from_namespace, (options_of(state, "model"), args))
    different = [
        f"  --{name.replace('_', '-')}: {getattr(before, name)} in the checkpoint,"
        f" {getattr(now, name)} here"
        for name in _SAME
        if getattr(before, name) != getattr(now, name)
    ]
    if different:
        raise ValueError(
            f"the model in {path} was trained with other options:\n" + "\n".join(different)
        )
    load_float(model, state["model"])


def trained_with(args: Any) -> dict[str, Any]:
    """Return the fields of QuantConfig in the checkpoint that a training resumes from, if any."""
    name = getattr(args, "restore_file", None)  # missing where nothing is trained
    path = Path(args.save_dir, name) if name == LAST else Path(name or "")
    return of_trained(quantizer_fields(options_in(path, "model")))


def options_in(path: Path, part: str) -> Mapping[str, Any]:
    """Read the options of "model" or "task" in a checkpoint; {} if it is unreadable."""
    if not path.is_file():
        return {}
    try:
        state = torch.load(path, map_location="cpu", mmap=True)
        clip_format.declare_numbers(state.get("model", {}))  # which options may name
        options = options_of(state, part)
        return options if isinstance(options, Mapping) else vars(options)
    # a damaged file can raise anything; fairseq loads it next and reports it
    except Exception:
        return {}


def options_of(state: dict[str, Any], part: str) -> Any:
    """Return the options of a part, from `args` of fairseq before 0.10 or from `cfg`."""
    return state["args"] if state.get("args") is not None else state["cfg"][part]
