"""A trained model by the path that a user gives: its files, and the model in memory.

`load` alone imports fairseq, which takes seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsq.commands.stages import read_marker
from lsq.files import check_name
from lsq.serving.search_options import SearchOptions
from lsq.text import vocabulary

if TYPE_CHECKING:
    from fairseq.data import Dictionary
    from fairseq.tasks import FairseqTask
    from torch import nn

    from lsq.fairseq.float_checkpoint import Languages

BEST = "checkpoint_best.pt"
TRANSLATION = "translation"
"""The folder of a run with the translation of its test set."""
OF_TRAINING = ("lsq_gemm_config", "lsq_gemm_coverage", "lsq_device", "lsq_activations")
"""Options in a checkpoint that are for the machine that trained."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files of a trained model; FileNotFoundError or ValueError if one is not there, or the data
    folder is none of fairseq's."""

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
            raise ValueError(
                f"{self.data} has no dictionaries (dict.*.txt); give the data folder of the"
                " training"
            )


def find(path: Path, data: Path | None = None, subwords: Path | None = None) -> Source:
    """Find the files of the model that `path` names; FileNotFoundError or ValueError without one.

    Args:
        path: a checkpoint, whose `data` are needed; a run of `lsq train-text`, output/name; or
            output, if there is one run in it.
        data, subwords: of a checkpoint.
    """
    for given in filter(None, (path, data, subwords)):
        check_name(given)
        if given.is_file() and not given.stat().st_size:
            raise ValueError(
                f"{given} is empty; it was not written whole, so make it again or name another"
            )
    if not path.is_dir():
        if data is None and path.exists():
            raise ValueError(
                f"{path} is no file of `lsq export --to lsq`; if it is a checkpoint, give the"
                " folder of its dictionaries (dict.*.txt), too: --data"
            )
        return Source(checkpoint=path, data=data or Path(), subwords=subwords)
    if data is not None or subwords is not None:
        raise ValueError(
            f"{path} is a folder, which has its data in it; leave --data and --sentencepiece-model"
            " out"
        )
    inner = [] if (path / "model" / BEST).exists() else sorted(path.glob(f"*/model/{BEST}"))
    if len(inner) > 1:
        names = ", ".join(str(found.parent.parent) for found in inner)
        raise ValueError(f"{path} has several runs; choose one of {names}")
    run = inner[0].parent.parent if inner else path
    if not (run / "model" / BEST).exists():
        raise ValueError(
            f"{path} is no finished run of lsq train-text: it has no model/{BEST}; or name a"
            " checkpoint"
        )
    output = run.absolute().parent
    subwords = output / "vocabulary" / vocabulary.MODEL
    return Source(checkpoint=run / "model" / BEST, data=output / "data", subwords=subwords)


def trained_length(checkpoint: Path) -> int | None:
    """Return the subwords of the longest sentence that a run of `lsq train-text` was trained with;
    None: the checkpoint is of no run."""
    marker = read_marker(checkpoint.parent)
    return marker and marker.key.get("--max-length")


def evaluation(checkpoint: Path) -> SearchOptions | None:
    """Return how a run of `lsq train-text` translated its test set; None: it is of no run."""
    length, marker = trained_length(checkpoint), read_marker(checkpoint.parent.parent / TRANSLATION)
    beam = marker.key.get("--beam", SearchOptions.beam) if marker else SearchOptions.beam
    return None if length is None else SearchOptions(beam=beam, max_len_b=length)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A trained model of lsq's or of fairseq's own, on the CPU, in eval mode, with its words."""

    model: "nn.Module"
    options: Mapping[str, Any]
    """fairseq's options of the model."""
    languages: "Languages"
    updates: int
    source: "Dictionary | None"
    """None: it is a language model."""
    target: "Dictionary"
    subwords: Path | None
    """sentencepiece's model."""
    task: "FairseqTask"
    criterion: Any
    """fairseq's options of its loss; None where the checkpoint has none, as exported ones."""
    trained_length: int | None
    """Subwords of the longest sentence of the training, if that is known."""
    search: SearchOptions
    """How the training itself translated, as far as that is known."""


def load(source: Source) -> Trained:
    """Read a model and its words; ValueError if the checkpoint is damaged or does not fit the
    dictionaries."""
    from fairseq import checkpoint_utils, tasks

    from lsq.commands.generate import load_fitting
    from lsq.fairseq.float_checkpoint import Languages
    from lsq.fairseq.generator import evaluation_of_task

    overrides = {"data": str(source.data), **dict.fromkeys(OF_TRAINING)}
    state = checkpoint_utils.load_checkpoint_to_cpu(str(source.checkpoint), overrides)
    task = tasks.setup_task(state["cfg"].task, from_checkpoint=True)
    (model,), options = load_fitting(
        str(source.data), [str(source.checkpoint)], overrides, task, state=state
    )
    translates, updates = hasattr(model, "encoder"), state["optimizer_history"][-1]["num_updates"]
    return Trained(
        model=model.cpu().eval(),
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
