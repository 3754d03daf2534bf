"""Trained models in memory, from the files that `lsq.commands.run_files` finds."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, tasks
from fairseq.data import Dictionary
from fairseq.tasks import FairseqTask
from torch import nn

from lsq.commands.generate import load_fitting
from lsq.commands.run_files import Source, evaluation, trained_length
from lsq.fairseq.float_checkpoint import Languages
from lsq.fairseq.generator import evaluation_of_task
from lsq.serving.search_options import SearchOptions

OF_TRAINING = ("lsq_gemm_config", "lsq_gemm_coverage", "lsq_device", "lsq_activations")
"""Options in a checkpoint that are for the machine that trained."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A trained model on the CPU, in eval mode, with the words that it knows."""

    model: nn.Module
    """lsq's, or one of fairseq's own."""
    options: Mapping[str, Any]
    """fairseq's options of the model."""
    languages: Languages
    updates: int
    source: Dictionary | None
    """None: it is a language model."""
    target: Dictionary
    subwords: Path | None
    """sentencepiece's model."""
    task: FairseqTask
    criterion: Any
    """fairseq's options of its loss; None where the checkpoint has none, as exported ones."""
    trained_length: int | None
    """Subwords of the longest sentence of the training, if that is known."""
    search: SearchOptions
    """How the training itself translated, as far as that is known."""


def load(source: Source) -> Trained:
    """Read a model and its words; ValueError if the checkpoint is damaged or does not fit the
    dictionaries."""
    overrides = {"data": str(source.data), **dict.fromkeys(OF_TRAINING)}
    state = checkpoint_utils.load_checkpoint_to_cpu(str(source.checkpoint), overrides)
    task = tasks.setup_task(state["cfg"].task, from_checkpoint=True)
    (model,), options = load_fitting(
        str(source.data), [str(source.checkpoint)], overrides, task, state=state
    )
    translates, updates = hasattr(model, "encoder"), state["optimizer_history"][-1]["num_updates"]
    return Trained(
        model=model.to(torch.device("cpu")).eval(),
        options=vars(options.model),
        languages=Languages(source=task.cfg.source_lang, target=task.cfg.target_lang)
        if translates
        else Languages(),
        updates=updates,
        source=task.source_dictionary if translates else None,
        target=task.target_dictionary,
        subwords=source.subwords,
        task=task,
        criterion=state["cfg"].get("criterion"),
        trained_length=trained_length(source.checkpoint),
        search=evaluation(source.checkpoint) or evaluation_of_task(task.cfg) or SearchOptions(),
    )
