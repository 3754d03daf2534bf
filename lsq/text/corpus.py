"""Parallel text: plain files with one sentence a line, checked, cleaned and split."""

import codecs
import random
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from lsq.files import write_text

SPLITS = ("train", "valid", "test")
SIDES = ("src", "tgt")
ENDS = (*SIDES, "lines")
"""Ends of the names of a split's files: both sides, and the lines of the user's files."""
FILES = tuple(f"{split}.{end}" for split in SPLITS for end in ENDS)
"""Names of the files of all splits."""
TextFiles = dict[str, tuple[Path, Path] | None]
"""The user's files (source, target) for each of SPLITS; None: pairs are held out of train."""
SPLIT_SEED = 1
"""Seed of the choice of held-out pairs, whatever --seed is: runs compare on the same text."""

ONE_A_LINE = "it must hold one sentence a line"

UNSEEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp", "Zs"))
"""Categories of Unicode with invisible characters: spaces, controls, marks such as U+200B."""
BLANKS = frozenset("\u034f\u115f\u1160\u2800\u3164\uffa0").union(map(chr, range(0xFE00, 0xFE10)))
"""Characters of other categories that are blank: fillers, joiners and selectors of variants."""


def has_text(line: str) -> bool:
    """Say whether a line has a visible character; one without is an empty line."""
    return any(unicodedata.category(one) not in UNSEEN and one not in BLANKS for one in line)


def write_items(path: Path, items: Iterable[object]) -> None:
    """Write a file with an item a line, whole or not at all."""
    write_text(path, "".join(f"{item}\n" for item in items))


def read_items(path: Path) -> list[str]:
    """Read a file of `write_items`."""
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Sentence pairs: `source[i]` means the same as `target[i]`."""

    source: list[str]
    target: list[str]
    lines: list[int]
    """The line, counted from 1, that each pair had in the files that the user gave."""

    def __len__(self) -> int:
        return len(self.source)

    def select(self, rows: list[int]) -> "Corpus":
        """Return the pairs of these rows, in this order."""
        columns = (self.source, self.target, self.lines)
        source, target, lines = ([column[row] for row in rows] for column in columns)
        return Corpus(source=source, target=target, lines=lines)

    def write(self, folder: Path, split: str) -> None:
        """Write the files folder/split.<end>, with an end for each of ENDS, an item a line."""
        for end, column in zip(ENDS, (self.source, self.target, self.lines), strict=True):
            write_items(folder / f"{split}.{end}", column)

    @classmethod
    def of(cls, source: list[str], target: list[str]) -> "Corpus":
        """Make a corpus of all lines of two files."""
        return cls(source=source, target=target, lines=list(range(1, len(source) + 1)))

    @classmethod
    def read(cls, folder: Path, split: str) -> "Corpus":
        """Read what `write` wrote."""
        source, target, lines = (read_items(folder / f"{split}.{end}") for end in ENDS)
        return cls(source=source, target=target, lines=list(map(int, lines)))


def check_file(path: Path) -> None:
    """Check that a file is there (FileNotFoundError), is no folder or the like, and is not empty
    (ValueError)."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty; {ONE_A_LINE}")


def read_lines(path: Path, say: Callable[[str], None]) -> list[str]:
    """Read the lines of a UTF-8 file, with single spaces for runs of white space; FileNotFoundError
    or ValueError if there is none, or it is no text.

    NUL bytes count as white space, too; `say` is called with their number. Lines end at a line feed
    (or carriage return and line feed) only: other line ends of Unicode are white space within a
    sentence, so that both files of a pair are counted alike.
    """
    check_file(path)
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if not data.strip():
        raise ValueError(f"{path} is empty; {ONE_A_LINE}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} is not valid UTF-8;"
            " convert the file first, e.g. with iconv"
        ) from None
    if nuls := text.count("\0"):
        noun = "byte" if nuls == 1 else "bytes"
        say(f"text: {path} has {nuls} NUL {noun}; spaces take their place")
    lines = text.replace("\0", " ").removesuffix("\n").split("\n")
    return [" ".join(line.split()) for line in lines]


def read_pairs(source: Path, target: Path, say: Callable[[str], None]) -> Corpus:
    """Read two files whose lines correspond, as `read_lines` does; ValueError if they have
    different numbers of lines."""
    sources, targets = read_lines(source, say), read_lines(target, say)
    if len(sources) != len(targets):
        raise ValueError(
            f"{source} has {len(sources)} lines but {target} has {len(targets)};"
            " line i of one must be the translation of line i of the other"
        )
    return Corpus.of(sources, targets)


def without_empty(corpus: Corpus) -> Corpus:
    """Return the pairs that have text on both sides."""
    pairs = zip(corpus.source, corpus.target, strict=True)
    return corpus.select([row for row, pair in enumerate(pairs) if all(map(has_text, pair))])


def hold_out(corpus: Corpus, count: int, seed: int) -> tuple[Corpus, Corpus]:
    """Split off `count` pairs at random; what remains shares no source sentence with them, and has
    two at least, or a ValueError is raised.

    Returns:
        (what remains, what is held out)
    """
    different = list(dict.fromkeys(corpus.source))
    if len(different) < count + 2:
        raise ValueError(
            f"{len(different)} different source sentences are too few to hold out {count} of them;"
            " give more text, or validation and test files of your own"
        )
    chosen = set(random.Random(seed).sample(different, count))
    first = {}
    for row, sentence in enumerate(corpus.source):
        if sentence in chosen:
            first.setdefault(sentence, row)
    remaining = [row for row, sentence in enumerate(corpus.source) if sentence not in chosen]
    return corpus.select(remaining), corpus.select(sorted(first.values()))


def write_splits(files: TextFiles, folder: Path, say: Callable[[str], None]) -> None:
    """Read the user's files, hold pairs out where there are none for a split, and write all splits
    into a folder; raises as `read_pairs` and `hold_out` do."""
    texts = {split: read_pairs(*pair, say) for split, pair in files.items() if pair is not None}
    pairs = without_empty(texts["train"])
    if empty := len(texts["train"]) - len(pairs):
        say(f"text: left out {empty} pairs of train with an empty side")
    splits = {**texts, "train": pairs}
    count = min(2000, max(1, len(pairs) // 20))
    for split in ("valid", "test"):
        if split not in splits:
            splits["train"], splits[split] = hold_out(splits["train"], count, SPLIT_SEED)
            say(f"text: held {count} pairs out of train for {split}")
    for split, text in splits.items():
        text.write(folder, split)
