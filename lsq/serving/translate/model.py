"""What a translator reads from the disk: a model at work, its vocabularies, and how long sentences
may be."""

from dataclasses import dataclass
from pathlib import Path

import torch

from lsq import extras
from lsq.files import check_name
from lsq.run.backends import Backend, backend
from lsq.serving.decode import SearchOptions, Steps, Symbols
from lsq.serving.decode.architecture import check_codes
from lsq.serving.decode.engine import Engine
from lsq.serving.export import model_file
from lsq.serving.translate.subwords import Subwords, Words, processor_of


@dataclass(frozen=True, kw_only=True, eq=False)
class TranslationModel:
    """A model that is ready to translate."""

    file: Path
    """What it was read from."""
    steps: Steps
    symbols: Symbols
    subwords: Subwords
    longest_source: int
    """Words of a sentence, its end included, at most."""
    options: SearchOptions
    """How the training itself translated, as far as that is known."""
    stamp: tuple
    """`stamp_of` the file when it was read."""

    def changed(self) -> bool:
        """Whether the file is another one by now, or gone; the model here is as it was read."""
        try:
            return stamp_of(self.file) != self.stamp
        except OSError:
            return True


def stamp_of(file: Path) -> tuple:
    """What changes when a file is replaced or written to.

    Raises:
        OSError: it is gone.
    """
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def load(
    path: Path,
    data: Path | None = None,
    sentencepiece_model: Path | None = None,
    place: Backend | None = None,
) -> TranslationModel:
    """Read a model from what `Translator` takes, to compute on `place`; None: on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: it is of fairseq, which is not installed.
        ValueError: a file is damaged, or of something else than a translation model, or it cannot
            compute there.
    """
    place = place or backend("cpu")
    check_name(path)
    if path.is_file() and model_file.is_model_file(path):
        if data is not None or sentencepiece_model is not None:
            raise ValueError(
                f"{path} has its words in it; leave --data and --sentencepiece-model out"
            )
        return _exported(path, place)
    for folder in (path, path.parent):
        if (folder / "model.bin").is_file() and (folder / "config.json").is_file():
            raise ValueError(
                f"{folder} is a model of CTranslate2's, which lsq does not read; name the run, or"
                " what"
                " `lsq export --to lsq` makes of it"
            )
    return _trained(path, data, sentencepiece_model, place)


def _exported(path: Path, place: Backend) -> TranslationModel:
    """What `lsq export` has written."""
    stamp = stamp_of(path)
    found = model_file.read(path)
    architecture = found.model.architecture
    if found.source is None or architecture.encoder is None:
        raise ValueError(f"{path} is a language model; it does not translate")
    end, longest = architecture.eos, architecture.encoder.max_positions
    source, target = (
        Words(symbols=symbols, beginning=architecture.bos, end=end, unknown=architecture.unk)
        for symbols in (found.source, found.target)
    )
    steps = Engine(found.model, place)
    # puts all weights in place: the file may change from now on
    steps.begin([torch.tensor([end])], rows=1, steps=1)
    steps.step(torch.tensor([end]), torch.tensor([0]), top=1)
    return TranslationModel(
        file=path,
        stamp=stamp,
        steps=steps,
        symbols=Symbols(start=end, padding=architecture.padding, end=end, unknown=architecture.unk),
        subwords=Subwords(source, target, found.subwords and processor_of(found.subwords)),
        longest_source=_longest(longest, found.trained_length),
        options=found.search,
    )


def _trained(
    path: Path, data: Path | None, sentencepiece_model: Path | None, place: Backend
) -> TranslationModel:
    """A checkpoint, or the best one of a run."""
    from lsq.commands import logs, run_files

    files = run_files.find(path, data, sentencepiece_model)
    logs.configure()
    try:
        from lsq.commands import trained  # it imports fairseq, which takes seconds
        from lsq.fairseq.checkpoint import options_in, quantization
        from lsq.fairseq.generator import steps_of
    except ModuleNotFoundError as error:
        raise extras.MissingPackage(
            f"{files.checkpoint} needs {extras.explanation(error.name or '')}; what `lsq export"
            " --to lsq` makes of it needs none"
        ) from error

    if place is not backend("cpu"):
        try:
            check_codes(quantization(options_in(files.checkpoint, "model")))
        except ValueError as error:
            raise ValueError(
                f"{files.checkpoint} is translated on the CPU alone: {error}"
            ) from None
    stamp = stamp_of(files.checkpoint)
    found = trained.load(files)
    if found.source is None:
        raise ValueError(
            f"{files.checkpoint} is a language model; it does not translate (see `lsq generate`)"
        )
    source, target = (
        Words(symbols=words.symbols, beginning=words.bos(), end=words.eos(), unknown=words.unk())
        for words in (found.source, found.target)
    )
    words = found.target
    return TranslationModel(
        file=files.checkpoint,
        stamp=stamp,
        steps=steps_of([found.model], place),
        symbols=Symbols(
            start=words.eos(), padding=words.pad(), end=words.eos(), unknown=words.unk()
        ),
        subwords=Subwords(source, target, files.subwords and processor_of(files.subwords)),
        longest_source=_longest(found.model.max_positions()[0], found.trained_length),
        options=found.search,
    )


def _longest(positions: int, trained: int | None) -> int:
    """Words of a source, its end included: no more than in training, where that is known."""
    return positions if trained is None else min(positions, trained + 1)
