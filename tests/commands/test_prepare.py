import dataclasses
from pathlib import Path

import pytest

from lsq.commands.prepare import TextFiles, prepare
from tests.commands.conftest import VOCABULARY, write_pairs


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_makes_what_fairseq_reads(prepared):
    expected = {f"{split}.src-tgt.{side}.{end}" for split in ("train", "valid", "test")
                for side in ("src", "tgt") for end in ("bin", "idx")}  # fmt: skip
    assert expected | {"dict.src.txt", "dict.tgt.txt"} <= names(prepared.data)
    assert len(prepared.lines("test", "src")) == 9
    assert prepared.lines("test", "tgt")[0].isupper()


def test_second_time_does_nothing(prepared, files, capsys):
    before = (prepared.data / "train.src-tgt.src.bin").stat().st_mtime_ns
    again = prepare(files, prepared.output, VOCABULARY)
    assert again == prepared
    assert (prepared.data / "train.src-tgt.src.bin").stat().st_mtime_ns == before
    assert capsys.readouterr().out.splitlines() == [
        "text: already done",
        "vocabulary: already done",
        "data: already done",
    ]


def test_changed_options_redo_only_what_depends_on_them(files, tmp_path, capsys):
    first = prepare(files, tmp_path, VOCABULARY)
    capsys.readouterr()
    second = prepare(files, tmp_path, dataclasses.replace(VOCABULARY, size=70))
    assert second.digest != first.digest
    assert "text: already done" in capsys.readouterr().out
    assert len((second.data / "dict.src.txt").read_text().splitlines()) == 80 - 4


def test_holds_out_lines_itself(tmp_path, capsys):
    files = TextFiles(train=write_pairs(tmp_path, "all", 200, seed=1), valid=None, test=None)
    found = prepare(files, tmp_path / "out", VOCABULARY)
    counts = [len(found.lines(split, "src")) for split in ("train", "valid", "test")]
    assert counts[1:] == [10, 10] and 150 < counts[0] <= 180
    assert not set(found.lines("train", "src")) & set(found.lines("test", "src"))
    assert "held 10 pairs out of train for valid" in capsys.readouterr().out


def test_long_lines_are_left_out_of_train_and_refused_in_test(files, tmp_path, capsys):
    short = dataclasses.replace(VOCABULARY, max_length=25)
    with pytest.raises(ValueError, match=r"pairs of test have a sentence of more than 25 pieces.*raise --max-length"):
        prepare(files, tmp_path, short)
    assert "left out:" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no pair of train is left"):
        prepare(files, tmp_path, dataclasses.replace(VOCABULARY, max_length=1))


def test_half_done_data_are_not_taken_for_done(files, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("lsq.commands.vocabulary.binarize", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(files, tmp_path, VOCABULARY)
    assert (prepare(files, tmp_path, VOCABULARY).data / "test.src-tgt.tgt.idx").exists()
