import random
from argparse import Namespace
from pathlib import Path

import pytest

from lsq.commands import compare, small_text, train_text


def write(folder: Path, pairs: int, words: int = 5000) -> tuple[Path, Path]:
    """Sentences of ten words of seven letters each, of so many different words."""
    chance = random.Random(1)
    known = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(words)]
    paths = folder / "train.en", folder / "train.de"
    for path in paths:
        path.write_text("".join(" ".join(chance.choices(known, k=10)) + "\n" for _ in range(pairs)))
    return paths


def parsed(folder: Path, *options: str, pairs: int = 200, words: int = 5000) -> None:
    source, target = write(folder, pairs, words)
    train_text.parsed(
        ["--src", str(source), "--tgt", str(target), "--output", str(folder / "out"), *options]
    )


def test_defaults_are_refused_with_numbers_that_fit(tmp_path):
    message = (
        r"the text is small \(200 lines, 32000 characters on both sides\) for the default"
        r" --vocabulary-size 8000 and"
        " --updates 10000; give --vocabulary-size 640 --updates 1000 --warmup 100 --validate-every"
        " 100, or numbers of"
    )
    with pytest.raises(ValueError, match=message):
        parsed(tmp_path)
    with pytest.raises(
        ValueError, match="default --vocabulary-size 8000; give --vocabulary-size 640, or numbers"
    ):
        parsed(tmp_path, "--prepare-only")
    with pytest.raises(
        ValueError, match="default --updates 10000; give --updates 3600 --validate-every 360, or"
    ):
        parsed(
            tmp_path,
            "--vocabulary-size=8000",
            "--warmup",
            "20",
            "--max-tokens",
            "300",
            "--update-freq",
            "2",
            pairs=400,
        )
    assert not (tmp_path / "out").exists()
    write(tmp_path, 200)
    with pytest.raises(ValueError, match="give --vocabulary-size 640 --updates 1000"):
        given = ["--src", str(tmp_path / "train.en"), "--tgt", str(tmp_path / "train.de")]
        compare.run(["--seeds", "1", *given, "--output", str(tmp_path / "out")])


def test_numbers_that_are_given_are_taken(tmp_path):
    parsed(tmp_path, "--vocabulary-size", "8000", "--updates", "10000")
    parsed(tmp_path, "--vocabulary-size", "8000", "--prepare-only")


def test_larger_texts_take_the_defaults(tmp_path):
    parsed(tmp_path, pairs=8000, words=20_000)


def test_a_vocabulary_has_room_for_characters_and_no_more_pieces_than_words(tmp_path):
    source, target = write(tmp_path, 200, words=30)
    given = Namespace(
        src=source,
        tgt=target,
        prepare_only=True,
        vocabulary_size=8000,
        updates=1,
        max_tokens=1,
        update_freq=1,
    )
    # 30 words, 26 letters, two kinds of space
    with pytest.raises(ValueError, match="give --vocabulary-size 58, or"):
        small_text.check(given, [])
    for path in (source, target):
        path.write_text("".join(chr(0x4E00 + number) + "\n" for number in range(1000)))
    with pytest.raises(ValueError, match="give --vocabulary-size 1100, or"):
        small_text.check(given, [])
