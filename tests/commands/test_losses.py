import json

import pytest

from lsq.commands.losses import LossCurve, draw_losses, read_losses


def test_curve_of_a_missing_file(tmp_path):
    assert read_losses(tmp_path / "losses.jsonl") == LossCurve()
    assert LossCurve().updates == 0


def test_later_entries_of_a_resumed_training_count(tmp_path):
    entries = [("train", 10, 5.0), ("valid", 10, 4.0), ("train", 20, 3.0), ("train", 20, 2.0), ("valid", 20, 1.5)]
    path = tmp_path / "losses.jsonl"
    lines = [
        json.dumps({"kind": kind, "update": update, "seconds": 7.5 + update, "loss": 9.0, "nll_loss": loss})
        for kind, update, loss in entries
    ]
    lines += ["", "7", "[]", "null", '{"kind": "train"}', '{"kind": "train", "update": "x", "seconds": 1, "loss": 1}']
    lines += ['{"kind": "train", "update": 1e999, "seconds": 1, "loss": 1}', "[" * 100_000]
    path.write_text("\n".join(lines) + "\n" + '{"kind": "tra')  # a line that is being written
    curve = read_losses(path)
    assert curve == LossCurve(training={10: 5.0, 20: 2.0}, validation={10: 4.0, 20: 1.5}, seconds=27.5)
    assert curve.updates == 20


@pytest.mark.parametrize("curve", [LossCurve(), LossCurve(training={1: 2.0, 2: 1.0}, validation={2: 1.1})])
def test_picture(tmp_path, curve):
    draw_losses({"float": curve, "int8": curve}, tmp_path / "losses.png", "Title")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
