"""Text as fairseq's binary data sets."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
import sentencepiece
import torch
from fairseq.data import indexed_dataset
from tqdm import tqdm

from lsq.text import corpus
from lsq.text.corpus import SIDES, SPLITS, Corpus, TextFiles
from lsq.text.vocabulary import dictionary_of, write_dictionaries

FILES = (
    *corpus.FILES,
    *(f"dict.{side}.txt" for side in SIDES),
    *(f"{split}.src-tgt.{side}.{end}" for split in SPLITS for side in SIDES for end in ("bin", "idx")),
)
"""Names of the files of a data folder: dictionaries, binary data sets, and the same sentences as text."""
CHUNK = 10_000
"""Sentences that are encoded in one call."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Pairs that are too long to train on."""

    count: int
    first_line: int
    """Where the first of them was in the user's files, counted from 1."""
    pieces: int
    """The pieces of its longer side."""


def binarize(
    corpus: Corpus,
    vocabulary: sentencepiece.SentencePieceProcessor,
    folder: Path,
    split: str,
    max_length: int,
) -> tuple[LeftOut | None, list[int]]:
    """Write one split as fairseq's memory-mapped data set: folder/split.src-tgt.{src,tgt}.{bin,idx}.

    Pairs in which a side has more than `max_length` pieces are left out.

    Returns:
        (what was left out, or None; the rows that were kept)
    """
    dictionary, index = dictionary_of(vocabulary)
    prefixes = [str(folder / f"{split}.src-tgt.{side}") for side in SIDES]
    builders = [
        indexed_dataset.make_builder(indexed_dataset.data_file_path(prefix), impl="mmap", vocab_size=len(dictionary))
        for prefix in prefixes
    ]
    kept, too_long = [], []
    with tqdm(total=len(corpus), desc=f"encoding {split}", unit=" pairs", leave=False, disable=None) as bar:
        for start in range(0, len(corpus), CHUNK):
            sides = [
                vocabulary.encode(side[start : start + CHUNK], out_type=int) for side in (corpus.source, corpus.target)
            ]
            for row, pair in enumerate(zip(*sides, strict=True), start):
                longest = max(map(len, pair))
                if longest > max_length:
                    too_long.append((row, longest))
                    continue
                kept.append(row)
                for builder, pieces in zip(builders, pair, strict=True):
                    codes = numpy.append(index[pieces], numpy.int32(dictionary.eos()))
                    builder.add_item(torch.from_numpy(codes))
            bar.update(len(sides[0]))
    for builder, prefix in zip(builders, prefixes, strict=True):
        builder.finalize(indexed_dataset.index_file_path(prefix))
    if not too_long:
        return None, kept
    row, pieces = too_long[0]
    return LeftOut(count=len(too_long), first_line=corpus.lines[row], pieces=pieces), kept


def binarize_splits(
    files: TextFiles,
    text: Path,
    vocabulary: sentencepiece.SentencePieceProcessor,
    folder: Path,
    max_length: int,
    say: Callable[[str], None],
) -> None:
    """Write FILES into `folder` from the splits in the folder `text`; `files` is where their sentences came from.

    Raises:
        ValueError: a pair of the user's own test text is too long, or no pair of a split is short enough.
    """
    write_dictionaries(vocabulary, folder)
    for split, given in files.splits().items():
        pairs = Corpus.read(text, split)
        left_out, kept = binarize(pairs, vocabulary, folder, split, max_length)
        if left_out:
            source = (given or files.train)[0]
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
