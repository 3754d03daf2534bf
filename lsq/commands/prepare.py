"""Stages that make fairseq's binary data from text files; finished stages are skipped.

output/text         cleaned sentence pairs of train, valid and test
output/vocabulary   sentencepiece's model of both languages
output/data         fairseq's dictionaries and binary data sets, and the same sentences as text
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lsq.commands import stages
from lsq.commands.stages import Stage, run_stage
from lsq.files import check_name
from lsq.text import binary, corpus, vocabulary
from lsq.text.corpus import SIDES, Corpus, TextFiles


def say(message: str) -> None:
    print(message, flush=True)


def text_option(split: str, side: str) -> str:
    return f"--{side}" if split == "train" else f"--{split}-{side}"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The data of all runs in an output folder; ValueError if its name is not UTF-8."""

    files: TextFiles
    output: Path
    size: int
    coverage: float
    max_length: int

    def __post_init__(self) -> None:
        check_name(self.output)

    @property
    def data(self) -> Path:
        return self.output / "data"

    @property
    def vocabulary(self) -> Path:
        return self.output / "vocabulary" / vocabulary.MODEL

    def lines(self, split: str, side: str) -> list[str]:
        return corpus.read_items(self.data / f"{split}.{side}")

    @cached_property
    def text_settings(self) -> dict:
        """Options of `lsq train-text` that the text depends on; see `stages.differences`."""
        found = {}
        for split, pair in self.files.items():
            for number, side in enumerate(SIDES):
                path = pair[number] if pair is not None else None
                if path is not None:
                    corpus.check_file(path)
                found[text_option(split, side)] = path and {
                    "file": str(path),
                    "sha256": stages.file_digest(path),
                }
            source, target = list(found.values())[-2:]
            if pair is not None and source["sha256"] == target["sha256"]:
                raise ValueError(
                    f"{pair[0]} and {pair[1]} are the same text; one must be the translation of the"
                    " other"
                )
        return found

    @cached_property
    def settings(self) -> dict:
        return {
            **self.text_settings,
            "--vocabulary-size": self.size,
            "--character-coverage": self.coverage,
            "--max-length": self.max_length,
        }


def prepare(prepared: Prepared) -> Prepared:
    """Clean and split the text, learn the vocabulary, binarise; ValueError or FileNotFoundError."""
    output = prepared.output
    text = Stage(name="text", folder=output / "text", makes=corpus.FILES)
    made = (vocabulary.MODEL, vocabulary.PIECES)
    learnt = Stage(name="vocabulary", folder=output / "vocabulary", makes=made)
    data = Stage(name="data", folder=prepared.data, makes=binary.FILES)
    for stage in (text, learnt, data):  # check all before any of them writes
        stage.check_own()

    def write(folder: Path) -> None:
        corpus.write_splits(prepared.files, folder, say)

    def learn(folder: Path) -> None:
        say(f"vocabulary: learning {prepared.size} pieces")
        pairs = Corpus.read(text.folder, "train")
        vocabulary.learn_vocabulary(pairs, folder, prepared.size, prepared.coverage)

    def binarize(folder: Path) -> None:
        pieces, most = vocabulary.load_vocabulary(learnt.folder), prepared.max_length
        binary.binarize_splits(prepared.files, text.folder, pieces, folder, most, say)

    of_pieces = {name: one for name, one in prepared.settings.items() if name != "--max-length"}
    run_stage(text, prepared.text_settings, write, say)
    run_stage(learnt, of_pieces, learn, say)
    run_stage(data, prepared.settings, binarize, say)
    return prepared
