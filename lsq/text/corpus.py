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
FILES = tuple(f"{split}.{end}" for split in SPLITS for end in ENDS)
TextFiles = dict[str, tuple[Path, Path] | None]
"""(source, target) for each of SPLITS; None: pairs are held out of train."""
SPLIT_SEED = 1

ONE_A_LINE = "it must hold one sentence a line"

UNSEEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp", "Zs"))
"""Categories of Unicode with invisible characters: spaces, controls, marks such as U+200B."""
BLANKS = frozenset("\u034f\u115f\u1160\u2800\u3164\uffa0").union(map(chr, range(0xFE00, 0xFE10)))
"""Invisible characters of other categories: fillers, joiners and variation selectors."""


def has_text(line: str) -> bool:
    """Return whether a line has a visible character; a line without one is empty."""
    return any(unicodedata.category(one) not in UNSEEN and one not in BLANKS for one in line)


def write_items(path: Path, items: Iterable[object]) -> None:
    write_text(path, "".join(f"{item}\n" for item in items))


def read_items(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Sentence pairs: `source[i]` means the same as `target[i]`."""

    source: list[str]
    target: list[str]
    lines: list[int]
    """Line numbers in the user's files, from 1."""

    def __len__(self) -> int:
        return len(self.source)

    def select(self, rows: list[int]) -> "Corpus":
        columns = (self.source, self.target, self.lines)
        source, target, lines = ([column[row] for row in rows] for column in columns)
        return Corpus(source=source, target=target, lines=lines)

    def write(self, folder: Path, split: str) -> None:
        for end, column in zip(ENDS, (self.source, self.target, self.lines), strict=True):
            write_items(folder / f"{split}.{end}", column)

    @classmethod
    def of(cls, source: list[str], target: list[str]) -> "Corpus":
        return cls(source=source, target=target, lines=list(range(1, len(source) + 1)))

    @classmethod
    def read(cls, folder: Path, split: str) -> "Corpus":
        source, target, lines = (read_items(folder / f"{split}.{end}") for end in ENDS)
        return cls(source=source, target=target, lines=list(map(int, lines)))


def check_file(path: Path) -> None:
    """Raise FileNotFoundError or ValueError unless a file exists and is not empty."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty; {ONE_A_LINE}")


def read_lines(path: Path, say: Callable[[str], None]) -> list[str]:
    """Read UTF-8 lines, which end at line feeds only; white space and NUL bytes become a space."""
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
    """Read two files with the same number of lines, or ValueError; also raises as `read_lines`."""
    sources, targets = read_lines(source, say), read_lines(target, say)
    if len(sources) != len(targets):
        raise ValueError(
            f"{source} has {len(sources)} lines but {target} has {len(targets)};"
            " line i of one must be the translation of line i of the other"
        )
    return Corpus.of(sources, targets)


def without_empty(corpus: Corpus) -> Corpus:
    pairs = zip(corpus.source, corpus.target, strict=True)
    return corpus.select([row for row, pair in enumerate(pairs) if all(map(has_text, pair))])


def hold_out(corpus: Corpus, count: int, seed: int) -> tuple[Corpus, Corpus]:
    """Draw `count` pairs at random; return (pairs that share no source with them, drawn pairs)."""
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
    """Read the user's files, hold out pairs, and write all splits; raises ValueError."""
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
