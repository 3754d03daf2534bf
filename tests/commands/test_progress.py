import sys

from fairseq.logging import metrics, progress_bar

from lsq.commands.losses import read_losses
from lsq.commands.progress import one_bar, recording


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


def test_one_bar_passes_everything_through():
    with one_bar("x", quiet=True):
        bar = progress_bar.progress_bar([1, 2, 3], log_format=None, default_log_format="tqdm")
        assert list(bar) == [1, 2, 3]
        bar.log({"wps": 1})


def test_bars_show_on_terminals_only(tmp_path, capsys, monkeypatch):
    def show():
        with recording(tmp_path / "losses.jsonl", updates=4, description="train", quiet=False):
            pass
        with one_bar("translate", quiet=False):
            list(progress_bar.progress_bar([1, 2, 3]))
        return capsys.readouterr().err

    assert show() == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shown = show()
    assert "train:" in shown and "translate:" in shown
