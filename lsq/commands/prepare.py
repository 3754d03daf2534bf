"""From text files to fairseq's binary data, in stages that are skipped when they are done already.

output/text         cleaned sentence pairs of train, valid and test
output/vocabulary   sentencepiece's model of both languages
output/data         fairseq's dictionaries and binary data sets, and the same sentences as text
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lsq.commands import corpus, stages, vocabulary
from lsq.commands.corpus import Corpus
from lsq.commands.stages import Stage, run_stage

SPLIT_SEED = 1
"""Chooses the held-out pairs; the same whatever --seed is, so that runs are compared on the same text."""
SPLITS = ("train", "valid", "test")
SIDES = ("src", "tgt")
TEXT_FILES = tuple(f"{split}.{end}" for split in SPLITS for end in corpus.ENDS)
DATA_FILES = (
    *TEXT_FILES,
    *(f"dict.{side}.txt" for side in SIDES),
    *(f"{split}.src-tgt.{side}.{end}" for split in SPLITS for side in SIDES for end in ("bin", "idx")),
)


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
        return {split: getattr(self, split) for split in SPLITS}


@dataclass(frozen=True, kw_only=True)
class VocabularyOptions:
    """How text becomes pieces."""

    size: int
    coverage: float
    max_length: int
    """Largest number of pieces of a sentence."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The data of all runs in an output folder."""

    files: TextFiles
    output: Path
    options: VocabularyOptions

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

    @cached_property
    def text_settings(self) -> dict:
        """What the text depends on, by the options of `lsq train-text`; see `stages.differences`.

        Raises:
            FileNotFoundError, ValueError: a file is missing, or no file.
        """
        found = {}
        for split, pair in self.files.splits().items():
            for number, side in enumerate(SIDES):
                path = pair[number] if pair is not None else None
                name = f"--{side}" if split == "train" else f"--{split}-{side}"
                if path is not None:
                    corpus.check_file(path)
                found[name] = path and {"file": str(path), "sha256": stages.file_digest(path)}
            source, target = list(found.values())[-2:]
            if pair is not None and source["sha256"] == target["sha256"]:
                raise ValueError(f"{pair[0]} and {pair[1]} are the same text; one must be the translation of the other")
        return found

    @cached_property
    def settings(self) -> dict:
        """What the data depend on, by the options of `lsq train-text`."""
        return {
            **self.text_settings,
            "--vocabulary-size": self.options.size,
            "--character-coverage": self.options.coverage,
            "--max-length": self.options.max_length,
        }


def prepare(prepared: Prepared) -> Prepared:
    """Clean and split the text, learn the vocabulary, binarise; returns `prepared`. Finished stages are skipped.

    Raises:
        FileNotFoundError, ValueError: a mistake in the files or options; a folder holds files that are not of this
            command.
    """
    output, options = prepared.output, prepared.options
    text = Stage(name="text", folder=output / "text", makes=TEXT_FILES)
    learnt = Stage(name="vocabulary", folder=output / "vocabulary", makes=(vocabulary.MODEL, vocabulary.PIECES))
    data = Stage(name="data", folder=prepared.data, makes=DATA_FILES)
    for stage in (text, learnt, data):  # all before any of them writes
        stage.check_own()
    run_stage(text, prepared.text_settings, lambda folder: _write_splits(prepared.files, folder), say)

    def learn(folder: Path) -> None:
        say(f"vocabulary: learning {options.size} pieces")
        vocabulary.learn_vocabulary(Corpus.read(text.folder, "train"), folder, options.size, options.coverage)

    run_stage(
        learnt, {name: value for name, value in prepared.settings.items() if name != "--max-length"}, learn, say
    )
    run_stage(data, prepared.settings, lambda folder: _binarize(prepared, text.folder, folder), say)
    return prepared


def _write_splits(files: TextFiles, folder: Path) -> None:
    given = {split: pair for split, pair in files.splits().items() if pair is not None}
    texts = {split: corpus.read_pairs(*pair, say) for split, pair in given.items()}
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


def _binarize(prepared: Prepared, text: Path, folder: Path) -> None:
    max_length = prepared.options.max_length
    pieces = vocabulary.load_vocabulary(prepared.vocabulary.parent)
    vocabulary.write_dictionaries(pieces, folder)
    for split, given in prepared.files.splits().items():
        pairs = Corpus.read(text, split)
        left_out, kept = vocabulary.binarize(pairs, pieces, folder, split, max_length)
        if left_out:
            source = (given or prepared.files.train)[0]
            what = (
                f"{left_out.count} pairs of {split} have a sentence of more than {max_length} pieces (--max-length),"
                f" the first in line {left_out.first_line} of {source} with {left_out.pieces}"
            )
            if split == "test" and given is not None:
                raise ValueError(f"{what}; shorten them or raise --max-length")
            say(f"data: left out: {what}")
        if not kept:
            raise ValueError(f"no pair of {split} is left; raise --max-length")
        pairs.select(kept).write(folder, split)
        say(f"data: {len(kept)} pairs of {split}")
