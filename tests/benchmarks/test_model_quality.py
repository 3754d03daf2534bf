"""Trainings of small models in float and in int8: how they are made and compared, and that each
runs."""

import argparse
import dataclasses
import json
import sys

import model_quality
import pytest
import torch
from model_quality import FLOAT, IGNORED, SIDES, Side, Text, Translation, groups, rate, rows

import lsq
from lsq.text.numbers import write_numbers

sys.modules.setdefault("torchaudio", None)  # one that cannot be loaded would stop transformers

SIZE = dataclasses.replace(
    model_quality.OF_TEXT, **{**model_quality.QUICK, "batch": 96, "updates": 20, "warmup": 4}
)


def test_differences_are_those_of_means():
    def result(bits, seconds):
        losses = [9.0] * 8 + [bits, bits + 1]
        return {"scores": {"bits": bits}, "losses": losses, "processor_seconds": seconds}

    floats, codes = [result(2.0, 4.0), result(3.0, 6.0)], [result(2.6, 1.0), result(3.4, 2.0)]
    first, loss, second, other = rows({FLOAT: floats, "int8": codes})
    assert (first["difference"], first["mean"]) == (0, 2.5)
    assert first["spread"] == pytest.approx(0.5**0.5)
    assert second["difference"] == pytest.approx(0.5) and second["error"] == pytest.approx(0.1)
    assert second["seeds"] == "2.600 / 3.400" and second["processor_seconds"] == 1.5
    assert (loss["score"], loss["mean"]) == ("training loss", 3.0)
    assert other["difference"] == pytest.approx(0.5)
    alone, _ = rows({FLOAT: [result(2.0, 4.0)]})
    assert alone["spread"] is alone["error"] is None


def test_the_learning_rate_rises_and_falls():
    assert [rate(SIZE, update) for update in (0, 3, 4)] == [0.25, 1.0, 1.0]
    assert rate(SIZE, 12) == pytest.approx(0.55) and rate(SIZE, 20) == pytest.approx(0.1)


def test_names_of_sides_are_names_of_files(tmp_path, monkeypatch):
    monkeypatch.setattr(model_quality, "train", lambda *given: {})
    given = {"pairs": None, "text": None, "finetune": None, "start": None}
    options = argparse.Namespace(output=tmp_path, **given)
    for side in SIDES:
        model_quality.result(Text(SIZE), side, 1, options)
    assert len(list(tmp_path.iterdir())) == len(SIDES)


class Squares(torch.nn.Module):
    """A loss whose gradients have 3,000 values and 2."""

    def __init__(self):
        super().__init__()
        self.weight, self.few = (torch.nn.Parameter(torch.ones(n)) for n in (3000, 2))

    def forward(self, x):
        loss = (x * self.weight).square().mean() + 1e-6 * (x[:, :2] * self.few).mean()
        return argparse.Namespace(loss=loss)


@pytest.mark.parametrize("mode, error", [(FLOAT, 0), ("int8", 3e-4), ("lean", 1e-2)])
def test_workers_average_their_gradients(mode, error):
    torch.manual_seed(1)
    model, batch = Squares(), {"x": torch.randn(16, 3000)}
    exact = model(**batch).loss
    weight, few = torch.autograd.grad(exact, list(model.parameters()))
    loss, found = model_quality.exchanged(model, batch, mode)
    torch.testing.assert_close(loss, exact.detach())
    torch.testing.assert_close(model.few.grad, few)
    off = (model.weight.grad - weight).square().sum() / weight.square().sum()
    assert found == pytest.approx(off.item(), rel=1e-3, abs=1e-9) and found <= error


def test_clips_decay_where_they_shall_alone():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    lsq.convert(model)

    def decaying(side: Side) -> set[str]:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        decay, keep = groups(model, side, 0.1)
        assert decay["weight_decay"] == 0.1 and keep["weight_decay"] == 0
        assert len(decay["params"]) + len(keep["params"]) == len(names)
        return {names[id(parameter)] for parameter in decay["params"]}

    assert decaying(SIDES["int8"]) == {"0.weight"}
    assert decaying(SIDES["int8, clips decay"]) == {"0.weight", "0.weight_clip", "0.input_clip"}


def test_a_text_is_long_enough_and_its_end_is_not_trained_on(tmp_path):
    path = tmp_path / "text"
    path.write_text("a" * 900 + "b" * 100, encoding="utf-8")
    task = Text(SIZE, path)
    assert (task.validation == ord("b")).all()
    assert task.validation.shape == (task.WINDOWS, SIZE.length)
    batch = next(task.batches(1))["input_ids"]
    assert (batch == ord("a")).all() and batch.shape == (SIZE.batch, SIZE.length)
    path.write_text("a" * 240, encoding="utf-8")
    with pytest.raises(ValueError, match="has 240 bytes; it must have more than 240"):
        Text(SIZE, path)


def test_batches_of_pairs_are_small_and_padded(tmp_path):
    write_numbers(tmp_path, 200, 20, 1)
    task = Translation(SIZE, tmp_path, ("src", "tgt"), 100, tmp_path / "subwords")
    source, target = task.pairs["train"][0]
    assert task._text([task.PADDING, *target]) == task.subwords.decode(target[:-1])
    assert target[-1] == task.END
    seen, batches = 0, task.batches(1)
    while seen < len(task.pairs["train"]):
        batch = next(batches)
        ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
        assert max(ids.numel(), labels.numel()) <= SIZE.batch and len(ids) == len(labels)
        assert torch.equal(ids == task.PADDING, mask == 0)
        assert (ids[mask.bool()] != task.PADDING).all()
        assert ((labels == task.END).sum(1) == 1).all() and (labels[labels != IGNORED] < 100).all()
        seen += len(ids)
    assert seen == len(task.pairs["train"])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "task",
    [
        "digits",
        *(
            pytest.param(task, marks=pytest.mark.thorough)
            for task in ("text", "llama", "translation")
        ),
    ],
)
def test_each_task_runs_and_is_kept(task, tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    given = [task, str(tmp_path / "trainings"), "--quick"]
    given += ["--seeds", "1", "2", "--sides", FLOAT, "int8"]
    metric = "right" if task == "digits" else "bits"
    picture = tmp_path / "losses.png"
    model_quality.main([*given, "--picture", str(picture)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert picture.stat().st_size > 0
    scores = {(row["side"], row["score"]) for row in found["rows"]}
    assert scores >= {(side, metric) for side in (FLOAT, "int8")}
    curves = [(curve["side"], curve["seed"]) for curve in found["curves"]]
    assert curves == [(side, seed) for side in (FLOAT, "int8") for seed in (1, 2)]
    assert all(len(curve["losses"]) == model_quality.QUICK["updates"] for curve in found["curves"])
    first, second, third, _ = (curve["losses"] for curve in found["curves"])
    # the same weights and batch
    assert first != second and first[0] == pytest.approx(third[0], rel=0.02)
    (kept,) = (tmp_path / "trainings").glob(f"{task}-int8-1.json")
    assert "run in int8" in json.loads(kept.read_text())["converted"]

    monkeypatch.setattr(model_quality, "train", None)  # would fail if it were called
    model_quality.main(given)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == found["rows"]
    with pytest.raises(TypeError):
        model_quality.main([*given, "--updates", "2"])
