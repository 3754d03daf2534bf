import os
from pathlib import Path

import pytest

from lsq.commands import prepare as module
from lsq.commands.prepare import Prepared
from lsq.commands.stages import MARKER
from lsq.text.corpus import SIDES, SPLITS, TextFiles
from tests.commands.conftest import VOCABULARY, write_pairs


def prepare(files: TextFiles, output: Path, **options) -> Prepared:
    return module.prepare(Prepared(files=files, output=output, **(VOCABULARY | options)))


def test_a_folder_whose_name_is_no_text_is_refused(files, tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    with pytest.raises(ValueError, match="is not UTF-8"):
        prepare(files, folder)
    assert not folder.exists()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_makes_what_fairseq_reads(prepared):
    sides = [f"{split}.src-tgt.{side}" for split in SPLITS for side in SIDES]
    expected = {f"{side}.{end}" for side in sides for end in ("bin", "idx")}
    assert expected | {"dict.src.txt", "dict.tgt.txt"} <= names(prepared.data)
    assert len(prepared.lines("test", "src")) == 9
    assert prepared.lines("test", "tgt")[0].isupper()


def test_changed_options_redo_only_what_depends_on_them(files, tmp_path, capsys):
    first = prepare(files, tmp_path)
    capsys.readouterr()
    second = prepare(files, tmp_path, size=70)
    assert second.settings != first.settings
    assert "text: already done" in capsys.readouterr().out
    assert len((second.data / "dict.src.txt").read_text().splitlines()) == 80 - 4


def test_holds_out_lines_itself(tmp_path, capsys):
    files = {"train": write_pairs(tmp_path, "all", 200, seed=1), "valid": None, "test": None}
    found = prepare(files, tmp_path / "out")
    counts = [len(found.lines(split, "src")) for split in SPLITS]
    assert counts[1:] == [10, 10] and 150 < counts[0] <= 180
    assert not set(found.lines("train", "src")) & set(found.lines("test", "src"))
    assert "held 10 pairs out of train for valid" in capsys.readouterr().out
    texts = [path.read_text().splitlines() for path in files["train"]]
    for split in SPLITS:
        lines = [int(line) for line in (found.data / f"{split}.lines").read_text().splitlines()]
        for text, side in zip(texts, SIDES, strict=True):
            assert [text[line - 1] for line in lines] == found.lines(split, side)


def test_long_lines_are_left_out_of_train_and_refused_in_test(files, tmp_path, capsys):
    message = r"pairs of test have a sentence of more than 25 pieces.*raise --max-length"
    with pytest.raises(ValueError, match=message):
        prepare(files, tmp_path, max_length=25)
    assert "left out:" in capsys.readouterr().out
    assert names(tmp_path) == {"text", "vocabulary"}  # nothing half-made
    with pytest.raises(ValueError, match="no pair of train is left"):
        prepare(files, tmp_path, max_length=1)


def test_half_done_data_are_not_taken_for_done(files, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupted = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
        patch.setattr("lsq.text.binary.binarize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(files, tmp_path)
    assert (prepare(files, tmp_path).data / "test.src-tgt.tgt.idx").exists()


def test_odd_texts(files, tmp_path, capsys):
    """NUL bytes are counted; lines that are too long are named as in the user's file."""
    with pytest.raises(ValueError, match="train.en and .*train.en are the same text"):
        prepare(files | {"train": files["train"][:1] * 2}, tmp_path / "out")
    source, target = write_pairs(tmp_path, "all", 200, seed=1)
    for path in (source, target):
        path.write_text("\n" * 3 + path.read_text() + " ".join(["horse"] * 60) + "\n")
    source.write_bytes(b"\0" + source.read_bytes() + b"\0\n")
    target.write_text(target.read_text() + "x\n")
    prepare({"train": (source, target), "valid": None, "test": None}, tmp_path / "out")
    printed = capsys.readouterr().out
    assert f"text: {source} has 2 NUL bytes; spaces take their place" in printed
    assert f"the first in line 204 of {source} with" in printed


@pytest.mark.parametrize(
    "path", ["data/dict.src.txt", "text/train.src", "vocabulary/sentencepiece.model"]
)
def test_files_of_somebody_else_stay(files, tmp_path, path):
    theirs = tmp_path / path
    theirs.parent.mkdir()
    theirs.write_text("precious")
    message = f"{theirs.parent} holds {theirs.name}, which this command did not make"
    with pytest.raises(ValueError, match=message):
        prepare(files, tmp_path)
    assert theirs.read_text() == "precious"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [theirs]


def test_damaged_data_are_made_again(files, tmp_path, capsys):
    found = prepare(files, tmp_path)
    damaged, missing = found.data / "train.src-tgt.src.bin", found.data / "test.tgt"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-4] + b"oops")
    missing.unlink()
    capsys.readouterr()
    prepare(files, tmp_path)
    printed = capsys.readouterr().out
    assert "vocabulary: already done" in printed and "data: already done" not in printed
    assert damaged.read_bytes() == content and missing.exists()
    made = damaged.stat().st_mtime_ns
    again = prepare(files, tmp_path)
    assert again == found and again.settings == found.settings
    said = [f"{stage}: already done" for stage in ("text", "vocabulary", "data")]
    assert capsys.readouterr().out.splitlines() == said and damaged.stat().st_mtime_ns == made
    marker = found.data / MARKER
    marker.write_bytes(marker.read_bytes()[:40])
    with pytest.raises(ValueError, match=rf"{marker}: this is not JSON .*delete {found.data}"):
        prepare(files, tmp_path)
