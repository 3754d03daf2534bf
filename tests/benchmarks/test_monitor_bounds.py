"""monitor_bounds: a training of two looks."""

import json

import monitor_bounds
import pytest
from monitor_trainings import TRAININGS

LONG = pytest.param("translation, whole layers", marks=pytest.mark.thorough)


@pytest.mark.parametrize("name", ["gated, of nn.Linear", LONG])
def test_a_short_training(name, capsys, monkeypatch):
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monitor_bounds.main(["--quick", "--threads", "1", "--only", name])
    found = json.loads(capsys.readouterr().out.rstrip("\n").split("\n")[-1])
    assert {row["training"] for row in found["rows"]} == {name} < set(TRAININGS)
    assert len(found["rows"]) == 3
    # so early, queries and keys have next to no gradient, and noise outweighs it
    for row in found["rows"]:
        least = -10 if row["quantity"] == "weight gradient" else 10
        assert (
            least
            < min(row["least_early"], row["least_late"])
            <= row["quantile_1"]
            <= row["median"]
            < 90
        )
    (outcome,) = found["outcomes"]
    assert abs(outcome["loss_int8"] - outcome["loss_float"]) < 0.1
