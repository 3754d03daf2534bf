"""A trained model by the path that a user gives: a folder of `lsq train-text`, or a checkpoint with its data folder."""

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
from lsq.commands.text_run import BEST
from lsq.fairseq.float_checkpoint import Languages
from lsq.files import check_name
from lsq.text import vocabulary

OF_TRAINING = ("lsq_gemm_config", "lsq_gemm_coverage", "lsq_device", "lsq_activations")
"""Options of the machine that trained, which a checkpoint keeps."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a trained model lies.

    Raises:
        FileNotFoundError: a file or folder is not there.
        ValueError: the data folder is none of fairseq's.
    """

    checkpoint: Path
    data: Path
    """The folder with its dictionaries, dict.*.txt."""
    subwords: Path | None
    """sentencepiece's model, if there is one."""

    def __post_init__(self) -> None:
        for path in filter(None, (self.checkpoint, self.data, self.subwords)):
            if not path.exists():
                raise FileNotFoundError(2, "is not there", str(path))
        if not any(self.data.glob("dict*.txt")):
            raise ValueError(f"{self.data} has no dictionaries (dict.*.txt); give the data folder of the training")


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


def find(path: Path, data: Path | None = None, subwords: Path | None = None) -> Source:
    """Where the model that `path` names lies.

    Args:
        path: a checkpoint, whose `data` are needed; a run of `lsq train-text`, output/name; or output, if there is one
            run in it.
        data, subwords: of a checkpoint.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is another folder, or an option is missing or not wanted.
    """
    for given in filter(None, (path, data, subwords)):
        check_name(given)
    if not path.is_dir():
        if data is None and path.exists():
            raise ValueError(
                f"{path} is no file of `lsq export --to lsq`; if it is a checkpoint, give the folder of its"
                " dictionaries (dict.*.txt), too: --data"
            )
        return Source(checkpoint=path, data=data or Path(), subwords=subwords)
    if data is not None or subwords is not None:
        raise ValueError(f"{path} is a folder, which has its data in it; leave --data and --sentencepiece-model out")
    inner = [] if (path / "model" / BEST).exists() else sorted(path.glob(f"*/model/{BEST}"))
    if len(inner) > 1:
        names = ", ".join(str(found.parent.parent) for found in inner)
        raise ValueError(f"{path} has several runs; choose one of {names}")
    run = inner[0].parent.parent if inner else path
    if not (run / "model" / BEST).exists():
        raise ValueError(f"{path} is no finished run of lsq train-text: it has no model/{BEST}; or name a checkpoint")
    output = run.absolute().parent
    subwords = output / "vocabulary" / vocabulary.MODEL
    return Source(checkpoint=run / "model" / BEST, data=output / "data", subwords=subwords)


def load(source: Source) -> Trained:
    """Read a model and its words.

    Raises:
        ValueError: the checkpoint is damaged or does not fit the dictionaries.
    """
    overrides = {"data": str(source.data), **dict.fromkeys(OF_TRAINING)}
    state = checkpoint_utils.load_checkpoint_to_cpu(str(source.checkpoint), overrides)
    task = tasks.setup_task(state["cfg"].task, from_checkpoint=True)
    (model,), options = load_fitting(str(source.data), [str(source.checkpoint)], overrides, task, state=state)
    translates, updates = hasattr(model, "encoder"), state["optimizer_history"][-1]["num_updates"]
    return Trained(
        model=model.to(torch.device("cpu")).eval(), options=vars(options.model),
        languages=Languages(source=task.cfg.source_lang, target=task.cfg.target_lang) if translates else Languages(),
        updates=updates, source=task.source_dictionary if translates else None, target=task.target_dictionary,
        subwords=source.subwords, task=task, criterion=state["cfg"].get("criterion"),
    )
