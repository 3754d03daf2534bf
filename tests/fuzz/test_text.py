"""Text that users hand in, and files of prepared folders, damaged."""

import json
import random
import shutil
from pathlib import Path

import pytest
from fairseq.data import Dictionary
from fairseq.data.encoders import sentencepiece_bpe
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceConfig

from lsq.commands import cli, generate
from lsq.commands.losses import read_losses
from tests.commands.conftest import WORDS
from tests.fuzz import trial
from tests.fuzz.mutations import mutated_bytes, mutated_text

pytestmark = pytest.mark.thorough


@trial.counts(60)
def test_a_corpus_is_prepared_or_refused(tmp_path, monkeypatch, count):
    monkeypatch.chdir(tmp_path)
    chance = random.Random(1)
    lines = [" ".join(chance.choices(WORDS, k=chance.randint(2, 7))) for _ in range(40)]
    content = {
        "en": "\n".join(lines) + "\n",
        "de": "\n".join(line[::-1].upper() for line in lines) + "\n",
    }
    given, output = tmp_path / "given", tmp_path / "output"
    given.mkdir()
    command = (
        "train-text --src given/text.en --tgt given/text.de --output output --prepare-only --quiet"
    ).split()

    def attempt(chance):
        damaged = chance.choice(["en", "de"])
        for side, text in content.items():
            changed = mutated_text(text.encode(), chance) if side == damaged else text.encode()
            (given / f"text.{side}").write_bytes(changed)
        shutil.rmtree(output, ignore_errors=True)
        found = trial.outcome(lambda: cli.main([*command, "--vocabulary-size", "60"]), given)
        left = [path.name for path in (*output.rglob("*.partial"), *output.rglob(".lsq.lock"))]
        return trial.Outcome(fault=f"left {left}") if left else found

    worked, refused = trial.survey("corpus", count, attempt)
    assert worked > count / 20 and refused > count / 5, (worked, refused)


def dictionary(path: Path) -> Dictionary:
    return Dictionary.load(str(path))


def subwords(path: Path) -> str:
    generate.check_subwords(str(path))
    return sentencepiece_bpe.SentencepieceBPE(
        SentencepieceConfig(sentencepiece_model=str(path))
    ).encode("red cat")


@trial.quick_counts
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("dict.src.txt", dictionary),
        ("sentencepiece.model", subwords),
        ("losses.jsonl", read_losses),
    ],
)
def test_a_file_of_a_prepared_folder_is_read_or_refused(tmp_path, prepared, name, read, count):
    path = tmp_path / name
    if name == "losses.jsonl":
        entries = [
            {"kind": "train", "update": 5 * n, "seconds": 0.1 * n, "loss": 9.5} for n in range(9)
        ]
        content = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
    else:
        content = (
            prepared.vocabulary if name.endswith("model") else prepared.data / name
        ).read_bytes()

    def attempt(chance):
        change = mutated_bytes if name == "sentencepiece.model" else mutated_text
        path.write_bytes(change(content, chance))
        return trial.outcome(lambda: read(path), tmp_path)

    trial.survey(name, count, attempt)
