"""Float checkpoints of fairseq's own transformer or transformer_lm, from a model of lsq.

A rounded weight becomes the floats that its codes stand for, so that the exported model multiplies
the same weights. It rounds no activations. If the table of words is also the projection onto the
vocabulary, it is rounded for the projection alone, and the checkpoint has both. It only has plain
values, so that torch.load reads it without lsq.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer.transformer_legacy import base_architecture
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from torch import Tensor, nn

from lsq import files
from lsq.fairseq import checkpoint
from lsq.layers import ProgramModule
from lsq.observe import quantized_tensors
from lsq.serving.decoding_model import model_of

VERSION = 3.0
"""Version of fairseq's stacks; below 3 they have no norm after the last layer."""
PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True, kw_only=True)
class Languages:
    """Languages of the data, for fairseq's task; None for a language model."""

    source: str | None = None
    target: str | None = None


def write(
    path: Path,
    model: nn.Module,
    options: Mapping[str, Any],
    languages: Languages,
    *,
    updates: int = 0,
) -> None:
    """Write the checkpoint, whole or not at all; ValueError if clips were never measured.

    Args:
        path: the file, which may exist.
        model: an LSQTransformerModel or LSQTransformerLanguageModel in eval mode.
        options: fairseq's options that it was built with.
        languages: of its data.
        updates: number of updates of its training.
    """
    translates = hasattr(model, "encoder")
    given = (of_translation if translates else of_language_model)(options)
    state = floats(model)
    if any(True for _ in quantized_tensors(model)):
        apart = ("share_all_embeddings", "share_decoder_input_output_embed")
        given |= {name: False for name in apart if name in given}
    if translates:
        task = {"_name": "translation", "source_lang": languages.source}
        task["target_lang"] = languages.target
    else:
        task = {"_name": "language_modeling", "tokens_per_sample": given["tokens_per_sample"]}
    for side in ("encoder", "decoder") if translates else ("decoder",):
        state[f"{side}.version"] = torch.tensor([VERSION])
    history = {
        "criterion_name": "CrossEntropyCriterion",
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {},
        "num_updates": updates,
    }
    content = {
        "args": None,
        "cfg": {"model": given, "task": {**task, "data": ""}},
        "model": state,
        "optimizer_history": [history],
        "last_optimizer_state": None,
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
    }
    files.write(path, lambda file: torch.save(content, file))


@torch.no_grad()
def floats(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters as fairseq names them, float32; a rounded weight is codes times scale."""
    clips = {name + checkpoint.CLIP for name, _ in quantized_tensors(model)}
    state = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in clips
    }
    for path, module in model.named_modules():
        if isinstance(module, ProgramModule) and module.weight_masks is not None:
            prefix = f"{path}." if path else ""
            state |= {
                prefix + name: module.values_of(name).detach() for name in module.weight_masks.names
            }
    if clips:
        decoding = model_of(model)
        for name, value in state.items():
            if name + ".codes" in decoding.tensors:
                rows, columns = value.shape
                scale = decoding.tensors[name + ".scale"][:rows, None]
                state[name] = decoding.codes(name, columns)[:rows] * scale
    return checkpoint.restore(state)


def of_translation(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of fairseq's transformer among ours, with its defaults."""
    parser = ArgumentParser()
    TransformerModel.add_args(parser)
    known = vars(parser.parse_args([]))
    args = Namespace(**{name: value for name, value in options.items() if name in known})
    base_architecture(args)
    return {"_name": "transformer", "arch": "transformer", **_plain(vars(args))}


def of_language_model(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of fairseq's transformer_lm among ours."""
    names = {field.name for field in fields(TransformerLanguageModelConfig)} - {"_name"}
    known = {name: value for name, value in options.items() if name in names}
    return {"_name": "transformer_lm", **_plain(known)}


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keep values of types that torch.load accepts by itself; choices become strings."""
    texts = {name: str(value) for name, value in options.items() if isinstance(value, str)}
    kept = {name: value for name, value in options.items() if type(value) in PLAIN}
    return kept | texts
