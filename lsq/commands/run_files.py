"""The files of a trained model by the path that a user gives.

Nothing here imports fairseq, which takes seconds.
"""

from dataclasses import dataclass
from pathlib import Path

from lsq.commands.stages import read_marker
from lsq.files import check_name
from lsq.serving.search_options import SearchOptions
from lsq.text import vocabulary

BEST = "checkpoint_best.pt"
TRANSLATION = "translation"
"""The folder of a run with the translation of its test set."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files of a trained model.

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
            raise ValueError(
                f"{self.data} has no dictionaries (dict.*.txt); give the data folder of the"
                " training"
            )


def find(path: Path, data: Path | None = None, subwords: Path | None = None) -> Source:
    """Find the files of the model that `path` names.

    Args:
        path: a checkpoint, whose `data` are needed; a run of `lsq train-text`, output/name; or
            output, if there is one run in it.
        data, subwords: of a checkpoint.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is another folder, or an option is missing or not wanted.
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
                " folder of its"
                " dictionaries (dict.*.txt), too: --data"
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
    """Subwords of the longest sentence that a run of `lsq train-text` was trained with; None: it is
    of no run."""
    marker = read_marker(checkpoint.parent)
    return marker and marker.key.get("--max-length")


def evaluation(checkpoint: Path) -> SearchOptions | None:
    """How a run of `lsq train-text` translated its test set; None: the checkpoint is of no run."""
    length, marker = trained_length(checkpoint), read_marker(checkpoint.parent.parent / TRANSLATION)
    beam = marker.key.get("--beam", SearchOptions.beam) if marker else SearchOptions.beam
    return None if length is None else SearchOptions(beam=beam, max_len_b=length)
