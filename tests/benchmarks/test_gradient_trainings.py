"""Trainings with rounded gradients: how they are compared, and that both scripts run."""

import json

import gradient_scales
import gradient_trainings
import pytest
import torch
from gradient_scales import KEPT
from gradient_schemes import SCHEMES
from gradient_trainings import FLOAT, PRODUCT, computing_on, rows

from lsq.run import backends
from lsq.text.numbers import write_numbers


def test_differences_are_those_of_means():
    def result(loss, bleu):
        return {"best_validation_loss": loss, "bleu": bleu}

    exact, rounded = [result(4.0, 10.0), result(5.0, 12.0)], [result(4.5, 9.0), result(5.5, 12.5)]
    first, second = rows({FLOAT: exact, PRODUCT: rounded})
    assert first["best_validation_loss"] == "4.0000 / 5.0000" and first["bleu"] == "10.00 / 12.00"
    assert first["best_validation_loss_difference"] == first["bleu_difference"] == 0
    assert second["best_validation_loss_difference"] == 0.5 and second["bleu_difference"] == -0.25


def test_layers_compute_elsewhere_for_a_while():
    place, other = torch.device("cpu"), backends.backend("reference")
    usual = backends.for_device(place)
    with pytest.raises(KeyError), computing_on(other):
        assert backends.for_device(place) is other
        raise KeyError
    assert backends.for_device(place) is usual
    with computing_on(None):
        assert backends.for_device(place) is usual


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_both_scripts_run_on_text(tmp_path, monkeypatch, capsys):
    write_numbers(tmp_path, 200, 4, 1)
    for path in tmp_path.iterdir():
        path.rename(path.with_suffix({".src": ".en", ".tgt": ".de"}.get(path.suffix, path.suffix)))
    output = tmp_path / "output"
    given = [str(tmp_path), str(output), "--quick", "--threads", "1"]

    def figures(script, *options: str) -> dict:
        monkeypatch.setattr("sys.argv", ["script", *given, *options])
        script.main()
        return json.loads(capsys.readouterr().out.rstrip("\n").split("\n")[-1])

    given_schemes = ["--seeds", "1", "--schemes", "tensor, delayed by 16"]
    assert [
        row["gradients"] for row in figures(gradient_trainings, *given_schemes)["rows"]
    ] == given_schemes[-1:]
    monkeypatch.setattr("gradient_backend.Rounding.study", None)  # would fail if it were called
    assert figures(gradient_trainings, *given_schemes)["rows"]
    measured = figures(gradient_scales, "--at", "1", "2")
    assert {row["scheme"] for row in measured["rows"]} == {
        *SCHEMES,
        *(f"row, {kept} of each kept" for kept in KEPT),
    }
    assert {row["update"] for row in measured["products"]} == {1, 2}
