"""From text files to fairseq's binary data, in stages that are skipped when they are done already.

output/text         cleaned sentence pairs of train, valid and test
output/vocabulary   sentencepiece's model of both languages
output/data         fairseq's dictionaries and binary data sets, and the same sentences as text
"""

from dataclasses import dataclass
from pathlib import Path

from lsq.commands import corpus, stages, vocabulary
from lsq.commands.corpus import Corpus

SPLIT_SEED = 1
"""Chooses the held-out pairs; the same whatever --seed is, so that runs are compared on the same text."""


def say(message: str) -> None:
    """Tell the user what goes on."""
    print(message, flush=True)


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """What the user gave: pairs of files (source, target); None where pairs are held out of train."""

    train: tuple[Path, Path]
    valid: tuple[Path, Path] | None
    test: tuple[Path, Path] | None

    def splits(self) -> dict[str, tuple[Path, Path] | None]:
        """The splits by name."""
        return {"train": self.train, "valid": self.valid, "test": self.test}


@dataclass(frozen=True, kw_only=True)
class VocabularyOptions:
    """How text becomes pieces."""

    size: int
    coverage: float
    max_length: int
    """Largest number of pieces of a sentence."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Where the data of all runs lie."""

    output: Path
    digest: str
    """Of everything that the data depend on."""

    @property
    def data(self) -> Path:
        """fairseq's data folder."""
        return self.output / "data"

    @property
    def vocabulary(self) -> Path:
        """sentencepiece's model."""
        return self.output / "vocabulary" / vocabulary.MODEL

    def lines(self, split: str, side: str) -> list[str]:
        """The sentences of one side, "src" or "tgt", of a split as it was binarised."""
        text = (self.data / f"{split}.{side}").read_text(encoding="utf-8")
        return text.removesuffix("\n").split("\n")


def prepare(files: TextFiles, output: Path, options: VocabularyOptions) -> Prepared:
    """Check, clean and split the text, learn the vocabulary, binarise. Finished stages are skipped.

    Raises:
        FileNotFoundError, ValueError: a mistake in the files or options.
    """
    given = {split: pair for split, pair in files.splits().items() if pair is not None}
    texts = {split: corpus.read_pairs(*pair) for split, pair in given.items()}
    key = {split: [stages.file_digest(path) for path in pair] for split, pair in given.items()}
    digest = stages.run_stage(output / "text", key, lambda folder: _write_splits(texts, folder), say)

    def learn(folder: Path) -> None:
        say(f"vocabulary: learning {options.size} pieces")
        vocabulary.learn_vocabulary(_read_split(output, "train"), folder, options.size, options.coverage)

    key = {"text": digest, "size": options.size, "coverage": options.coverage}
    digest = stages.run_stage(output / "vocabulary", key, learn, say)

    def binarize(folder: Path) -> None:
        pieces = vocabulary.load_vocabulary(output / "vocabulary")
        vocabulary.write_dictionaries(pieces, folder)
        for split in files.splits():
            pairs = _read_split(output, split)
            left_out, kept = vocabulary.binarize(pairs, pieces, folder, split, options.max_length)
            if left_out:
                _report_left_out(left_out, split, split == "test" and files.test is not None, options.max_length)
            if not kept:
                raise ValueError(f"no pair of {split} is left; raise --max-length")
            pairs.select(kept).write(folder, split)
            say(f"data: {len(kept)} pairs of {split}")

    key = {"vocabulary": digest, "max_length": options.max_length}
    digest = stages.run_stage(output / "data", key, binarize, say)
    return Prepared(output=output, digest=digest)


def _read_split(output: Path, split: str) -> Corpus:
    sides = [(output / "text" / f"{split}.{side}").read_text(encoding="utf-8") for side in ("src", "tgt")]
    source, target = (side.removesuffix("\n").split("\n") for side in sides)
    return Corpus(source=source, target=target)


def _write_splits(texts: dict[str, Corpus], folder: Path) -> None:
    pairs = corpus.without_empty(texts["train"])
    if empty := len(texts["train"]) - len(pairs):
        say(f"text: left out {empty} pairs of train with an empty side")
    splits = {"train": pairs, **{split: text for split, text in texts.items() if split != "train"}}
    count = corpus.held_out_count(len(pairs))
    for split in ("valid", "test"):
        if split not in splits:
            splits["train"], splits[split] = corpus.hold_out(splits["train"], count, SPLIT_SEED)
            say(f"text: held {count} pairs out of train for {split}")
    for split, text in splits.items():
        text.write(folder, split)


def _report_left_out(left_out: vocabulary.LeftOut, split: str, refuse: bool, max_length: int) -> None:
    what = (
        f"{left_out.count} pairs of {split} have a sentence of more than {max_length} pieces (--max-length),"
        f" the first in line {left_out.first_line} with {left_out.pieces}"
    )
    if refuse:
        raise ValueError(f"{what}; shorten them or raise --max-length")
    say(f"data: left out: {what}")
