"""Losses and progress of trainings: what is recorded, read again, drawn and shown."""

import json
import sys

from fairseq.logging import metrics, progress_bar

from lsq.commands.losses import LossCurve, draw_losses, one_bar, read_losses, recording


def test_later_entries_of_a_resumed_training_count(tmp_path):
    path = tmp_path / "losses.jsonl"
    assert read_losses(path) == LossCurve() and LossCurve().updates == 0
    values = [(0, 10, 5.0), (1, 10, 4.0), (0, 20, 3.0), (0, 20, 2.0), (1, 20, 1.5)]
    entries = [
        {"kind": ("train", "valid")[kind], "update": update, "seconds": 7.5 + update, "loss": 9.0}
        | {"nll_loss": loss}
        for kind, update, loss in values
    ]
    lines = [*map(json.dumps, entries), "", "7", "[]", "null", '{"kind": "train"}', "[" * 100_000]
    for update in ('"x"', "1e999"):
        lines.append(f'{{"kind": "train", "update": {update}, "seconds": 1, "loss": 1}}')
    path.write_text("\n".join(lines) + "\n" + '{"kind": "tra')  # a line that is being written
    curve = read_losses(path)
    training, validation = {10: 5.0, 20: 2.0}, {10: 4.0, 20: 1.5}
    assert curve == LossCurve(training=training, validation=validation, seconds=27.5)
    assert curve.updates == 20


CURVE = LossCurve(training={1: 2.0, 2: 1.0}, validation={2: 1.1}, seconds=0.3)


def test_pictures(tmp_path, monkeypatch):
    for curve in (LossCurve(), CURVE):
        draw_losses({"float": curve, "int8": curve}, tmp_path / "losses.png", "Title")
        assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    drawn = []
    savefig = "matplotlib.figure.Figure.savefig"
    monkeypatch.setattr(savefig, lambda figure, *_, **__: drawn.append(figure))
    draw_losses({"int8": CURVE}, tmp_path / "losses.png", "Title")
    found = [[line.get_xydata().tolist() for line in axes.lines] for axes in drawn[0].axes]
    assert found == [[[[1, 2.0], [2, 1.0]], [[2, 1.1]]]]


def test_recording_writes_what_fairseq_logs(tmp_path):
    path = tmp_path / "losses.jsonl"
    fairseqs = progress_bar.progress_bar
    with recording(path, updates=4, description="x", quiet=True), metrics.aggregate("train"):
        bar = progress_bar.progress_bar(["a", "b"], epoch=1, tensorboard_logdir=None)
        assert list(bar) == ["a", "b"]
        bar.update_config({})
        bar.log({"loss": 3.0, "nll_loss": 2.5, "lr": 0.1, "wps": 7}, tag="train_inner", step=2)
        bar.print({"loss": 9.0}, tag="train", step=2)
        bar.print({"loss": 2.0, "nll_loss": 1.5}, tag="valid", step=4)
    assert progress_bar.progress_bar is fairseqs
    curve = read_losses(path)
    assert (curve.training, curve.validation) == ({2: 2.5}, {4: 1.5})


def test_bars_show_on_terminals_only(tmp_path, capsys, monkeypatch):
    def show():
        with recording(tmp_path / "losses.jsonl", updates=4, description="train", quiet=False):
            pass
        with one_bar("translate", quiet=False):
            bar = progress_bar.progress_bar([1, 2], log_format=None, default_log_format="tqdm")
            assert list(bar) == [1, 2]
            bar.log({"wps": 1})
        return capsys.readouterr().err

    assert show() == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shown = show()
    assert "train:" in shown and "translate:" in shown
