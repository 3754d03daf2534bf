"""sparse_training: every way, on a few batches of made text."""

import lzma

import pytest
import sparse_training


@pytest.mark.thorough
def test_every_way(monkeypatch, tmp_path):
    for name, value in {"HELD_OUT": 700, "BATCHES": 1, "SEQUENCES": 2, "LENGTH": 12}.items():
        monkeypatch.setattr(sparse_training, name, value)
    path = tmp_path / "text.xz"
    path.write_bytes(lzma.compress(b"To be, or not to be. " * 100))
    text, held_out = sparse_training.read(path)
    assert len(text) == 1400 and len(held_out) == 700 and text.min() > sparse_training.PADDING
    rows = {row["way"]: row for row in sparse_training.compare(text, held_out, 3, 2, seed=1)}
    assert rows.keys() == sparse_training.WAYS.keys()
    assert all(0 < row["retrained"] < row["pruned"] < 20 for row in rows.values())
    assert (
        rows["dense"]["pruned"]
        != rows["straight-through"]["pruned"]
        == rows["masks stay, by magnitude"]["pruned"]
    )
    assert (
        rows["masks stay, by output"]["exchanged"]
        == 0
        < rows["SR-STE, decay 1, every update"]["exchanged"]
    )


def test_short_texts_are_refused(tmp_path):
    (tmp_path / "text").write_text("short")
    with pytest.raises(ValueError, match="has 5 bytes; give a text of 120000 or more"):
        sparse_training.read(tmp_path / "text")
