"""Text of the built-in task: English and German names of numbers (num2words)."""

import random
from pathlib import Path

from num2words import num2words
from tqdm import tqdm

from lsq.text.corpus import Corpus

DIGITS = 6
VALID_PAIRS = 200
FEWEST_HELD_OUT = 3
"""Fewest digits of numbers that are held out; shorter numbers are all for training."""


def sample_numbers(
    count: int, generator: random.Random, excluded: set[int] = frozenset(), fewest_digits: int = 1
) -> list[int]:
    """Draw different numbers, about equally many of each length; ValueError for too many."""
    available = 10**DIGITS - len(excluded)
    if count > available // 2:
        raise ValueError(f"{count} numbers are wanted, but at most {available // 2} can be drawn")
    drawn: dict[int, None] = {}
    while len(drawn) < count:
        digits = generator.randint(fewest_digits, DIGITS)
        number = generator.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
        if number not in excluded:
            drawn[number] = None
    return list(drawn)


def name_numbers(numbers: list[int], description: str) -> Corpus:
    bar = tqdm(numbers, desc=description, unit=" numbers", leave=False, disable=None)
    names = [(num2words(number, lang="en"), num2words(number, lang="de")) for number in bar]
    return Corpus.of([english for english, _ in names], [german for _, german in names])


def write_numbers(folder: Path, train_pairs: int, test_pairs: int, seed: int) -> None:
    """Write train, valid and test, which share no number."""
    generator = random.Random(seed)
    held_out = sample_numbers(VALID_PAIRS + test_pairs, generator, fewest_digits=FEWEST_HELD_OUT)
    splits = {
        "train": sample_numbers(train_pairs, generator, set(held_out)),
        "valid": held_out[:VALID_PAIRS],
        "test": held_out[VALID_PAIRS:],
    }
    for split, numbers in splits.items():
        name_numbers(numbers, f"naming the numbers of {split}").write(folder, split)
