"""Files of a trained model, found by the path that a user gives, and the model in memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsq.commands.options import check_there
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
OF_TRAINING = ("lsq_gemm_config", "lsq_gemm_coverage", "lsq_device", "lsq_activations")
"""Options in a checkpoint that concern only the machine of the training."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files of a trained model; FileNotFoundError or ValueError if one is missing."""

    checkpoint: Path
    data: Path
    subwords: Path | None

    def __post_init__(self) -> None:
        check_there(self.checkpoint, self.data, self.subwords)
        if not any(self.data.glob("dict*.txt")):
            raise ValueError(
                f"{self.data} has no dictionaries (dict.*.txt); give the data folder of the"
                " training"
            )


def find(path: Path, data: Path | None = None, subwords: Path | None = None) -> Source:
    """Find the files of a checkpoint with its `data` and `subwords`, of a run of `lsq train-text`,
    or of an output folder with one run; FileNotFoundError or ValueError if they are missing."""
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
    given = {"--data": data, "--sentencepiece-model": subwords}
    if options := " and ".join(option for option, value in given.items() if value is not None):
        raise ValueError(f"{path} is a folder, which has its data in it; leave {options} out")
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A trained model of lsq or fairseq, on the CPU, in eval mode, with its dictionaries."""

    model: "nn.Module"
    options: Mapping[str, Any]
    languages: "Languages"
    updates: int
    source: "Dictionary | None"
    """None for a language model."""
    target: "Dictionary"
    subwords: Path | None
    task: "FairseqTask"
    criterion: Any
    """fairseq's options of its criterion, if known."""
    trained_length: int | None
    search: SearchOptions


def load(source: Source) -> Trained:
    """Load a model and its dictionaries; ValueError if it is damaged, or they do not fit it."""
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
    trained = read_marker(source.checkpoint.parent)
    length = trained and trained.key.get("--max-length")  # None: a checkpoint outside of a run
    search = evaluation_of_task(task.cfg) or SearchOptions()
    if length is not None:  # as the run translated its test set
        marker = read_marker(source.checkpoint.parent.parent / TRANSLATION)
        beam = marker.key.get("--beam", SearchOptions.beam) if marker else SearchOptions.beam
        search = SearchOptions(beam=beam, max_len_b=length)
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
        trained_length=length,
        search=search,
    )
