import json

import pytest

from lsq.commands.losses import LossCurve, draw_losses, read_losses


def test_curve_of_a_missing_file(tmp_path):
    assert read_losses(tmp_path / "losses.jsonl") == LossCurve()
    assert LossCurve().updates == 0


def test_later_entries_of_a_resumed_training_count(tmp_path):
    entries = [
        ("train", 10, 5.0),
        ("valid", 10, 4.0),
        ("train", 20, 3.0),
        ("train", 20, 2.0),
        ("valid", 20, 1.5),
    ]
    path = tmp_path / "losses.jsonl"
    lines = [
        json.dumps(
            {"kind": kind, "update": update, "seconds": 7.5 + update, "loss": 9.0, "nll_loss": loss}
        )
        for kind, update, loss in entries
    ]
    lines += [
        "",
        "7",
        "[]",
        "null",
        '{"kind": "train"}',
        '{"kind": "train", "update": "x", "seconds": 1, "loss": 1}',
    ]
    lines += ['{"kind": "train", "update": 1e999, "seconds": 1, "loss": 1}', "[" * 100_000]
    path.write_text("\n".join(lines) + "\n" + '{"kind": "tra')  # a line that is being written
    curve = read_losses(path)
    assert curve == LossCurve(
        training={10: 5.0, 20: 2.0}, validation={10: 4.0, 20: 1.5}, times={10: 17.5, 20: 27.5}
    )
    assert (curve.updates, curve.seconds) == (20, 27.5)


CURVE = LossCurve(training={1: 2.0, 2: 1.0}, validation={2: 1.1}, times={1: 0.1, 2: 0.3})


@pytest.mark.parametrize("curve", [LossCurve(), CURVE])
def test_picture(tmp_path, curve):
    draw_losses({"float": curve, "int8": curve}, tmp_path / "losses.png", "Title")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_picture_over_updates_and_over_seconds(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure)
    )
    draw_losses({"int8": CURVE}, tmp_path / "losses.png", "Title")
    by_update, by_second = drawn[0].axes
    assert [line.get_xydata().tolist() for line in by_update.lines] == [
        [[1, 2.0], [2, 1.0]],
        [[2, 1.1]],
    ]
    assert [line.get_xydata().tolist() for line in by_second.lines] == [
        [[0.1, 2.0], [0.3, 1.0]],
        [[0.3, 1.1]],
    ]
