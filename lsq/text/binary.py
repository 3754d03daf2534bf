"""Text as fairseq's binary data sets."""

from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from fairseq.data import indexed_dataset
from sentencepiece import SentencePieceProcessor
from tqdm import tqdm

from lsq.text import corpus
from lsq.text.corpus import SIDES, SPLITS, Corpus, TextFiles
from lsq.text.vocabulary import dictionary_of

FILES = (
    *corpus.FILES,
    *(f"dict.{side}.txt" for side in SIDES),
    *(f"{split}.src-tgt.{side}.bin" for split in SPLITS for side in SIDES),
    *(f"{split}.src-tgt.{side}.idx" for split in SPLITS for side in SIDES),
)
CHUNK = 10_000


def binarize(
    corpus: Corpus, vocabulary: SentencePieceProcessor, folder: Path, split: str, max_length: int
) -> tuple[list[int], dict[int, int]]:
    """Write a split as fairseq's data set; return (kept rows, row too long -> its pieces)."""
    dictionary, index = dictionary_of(vocabulary)
    prefixes = [str(folder / f"{split}.src-tgt.{side}") for side in SIDES]
    paths = map(indexed_dataset.data_file_path, prefixes)
    options = {"impl": "mmap", "vocab_size": len(dictionary)}
    builders = [indexed_dataset.make_builder(path, **options) for path in paths]
    kept, left_out = [], {}
    shown = {"desc": f"encoding {split}", "unit": " pairs", "leave": False, "disable": None}
    with tqdm(total=len(corpus), **shown) as bar:
        for start in range(0, len(corpus), CHUNK):
            sides = [
                vocabulary.encode(side[start : start + CHUNK], out_type=int)
                for side in (corpus.source, corpus.target)
            ]
            for row, pair in enumerate(zip(*sides, strict=True), start):
                longest = max(map(len, pair))
                if longest > max_length:
                    left_out[row] = longest
                    continue
                kept.append(row)
                for builder, pieces in zip(builders, pair, strict=True):
                    codes = numpy.append(index[pieces], numpy.int32(dictionary.eos()))
                    builder.add_item(torch.from_numpy(codes))
            bar.update(len(sides[0]))
    for builder, prefix in zip(builders, prefixes, strict=True):
        builder.finalize(indexed_dataset.index_file_path(prefix))
    return kept, left_out


def binarize_splits(
    files: TextFiles,
    text: Path,
    vocabulary: SentencePieceProcessor,
    folder: Path,
    max_length: int,
    say: Callable[[str], None],
) -> None:
    """Write FILES from the splits in `text`; ValueError for long test lines or an empty split."""
    dictionary, _ = dictionary_of(vocabulary)
    for side in SIDES:
        dictionary.save(str(folder / f"dict.{side}.txt"))
    for split, given in files.items():
        pairs = Corpus.read(text, split)
        kept, left_out = binarize(pairs, vocabulary, folder, split, max_length)
        if left_out:
            source, (row, pieces) = (given or files["train"])[0], next(iter(left_out.items()))
            what = (
                f"{len(left_out)} pairs of {split} have a sentence of more than {max_length} pieces"
                f" (--max-length), the first in line {pairs.lines[row]} of {source} with {pieces}"
            )
            if split == "test" and given is not None:
                raise ValueError(f"{what}; shorten them or raise --max-length")
            say(f"data: left out: {what}")
        if not kept:
            raise ValueError(f"no pair of {split} is left; raise --max-length")
        pairs.select(kept).write(folder, split)
        say(f"data: {len(kept)} pairs of {split}")
