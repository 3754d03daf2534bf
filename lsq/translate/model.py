"""What a translator reads from the disk: a model at work, its vocabularies, and how long sentences may be."""

from dataclasses import dataclass
from pathlib import Path

from lsq.decode import SearchOptions, Steps
from lsq.decode.fairseq_steps import FairseqSteps
from lsq.decode.symbols import Symbols
from lsq.translate.subwords import Subwords, Words, processor_of


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


def load(path: Path, data: Path | None = None, sentencepiece_model: Path | None = None) -> TranslationModel:
    """Read a model from what `Translator` takes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is damaged, or of something else than a translation model.
    """
    from lsq.commands import logs

    logs.configure()
    from lsq.commands import trained  # it imports fairseq, which takes seconds
    from lsq.commands.stages import read_marker

    place = trained.find(path, data, sentencepiece_model)
    stamp = stamp_of(place.checkpoint)
    found = trained.load(place)
    if found.source is None:
        raise ValueError(f"{place.checkpoint} is a language model; it does not translate (see `lsq generate`)")
    source, target = (
        Words(symbols=words.symbols, beginning=words.bos(), end=words.eos(), unknown=words.unk())
        for words in (found.source, found.target)
    )
    end, longest = found.target.eos(), found.model.max_positions()[0]
    marker = read_marker(place.checkpoint.parent)
    trained_length = marker and marker.key.get("--max-length")
    return TranslationModel(
        file=place.checkpoint,
        stamp=stamp,
        steps=FairseqSteps(found.model),
        symbols=Symbols(start=end, padding=found.target.pad(), end=end, unknown=found.target.unk()),
        subwords=Subwords(source, target, place.subwords and processor_of(place.subwords)),
        longest_source=min(longest, trained_length + 1) if trained_length else longest,
        options=SearchOptions(max_len_b=trained_length) if trained_length else SearchOptions(),
    )
