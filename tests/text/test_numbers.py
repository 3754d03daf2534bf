import random

import pytest

from lsq.text import numbers
from lsq.text.corpus import SPLITS
from lsq.text.numbers import name_numbers, sample_numbers


def test_samples_are_different_and_avoid_the_excluded():
    excluded = set(range(0, 1_000_000, 2))
    found = sample_numbers(2000, random.Random(1), excluded)
    assert len(set(found)) == 2000
    assert not set(found) & excluded
    lengths = {len(str(number)) for number in found}
    assert lengths == {1, 2, 3, 4, 5, 6}


def test_too_many_numbers():
    with pytest.raises(ValueError, match="600000 numbers are wanted, but at most 500000"):
        sample_numbers(600_000, random.Random(1))


def test_names():
    names = name_numbers([21, 345], "naming")
    assert names.source == ["twenty-one", "three hundred and forty-five"]
    assert names.target == ["einundzwanzig", "dreihundertfünfundvierzig"]


def test_splits_do_not_overlap_and_short_numbers_are_all_for_training(tmp_path):
    numbers.write_numbers(tmp_path, train_pairs=3000, test_pairs=500, seed=1)
    lines = {name: (tmp_path / f"{name}.src").read_text().splitlines() for name in SPLITS}
    assert [len(lines[split]) for split in SPLITS] == [3000, numbers.VALID_PAIRS, 500]
    assert len(set().union(*lines.values())) == 3500 + numbers.VALID_PAIRS
    short = {line for line in lines["train"] if "hundred" not in line and "thousand" not in line}
    assert len(short) == 100
    held_out = lines["valid"] + lines["test"]
    assert all("hundred" in line or "thousand" in line for line in held_out)
    assert 100 < sum("thousand" not in line for line in held_out) < 250
