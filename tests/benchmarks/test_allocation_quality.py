"""Methods of allocation on a small Llama: each row is of its budget, and differences of one
model."""

import json

import allocation_quality
import pytest
import torch


@pytest.mark.slow
def test_rows(tmp_path, capsys):
    file = tmp_path / "rows.json"
    given = ["--quick", "--threads", "1", "--budgets", "2", "--last", "1", "--trained", "exact"]
    methods = ["exact", "exact, drawn labels", "refine", "random"]
    allocation_quality.main([*given, "--methods", *methods, "--json", str(file)])
    assert "ratio" in capsys.readouterr().out
    found = json.loads(file.read_text())
    sides = [row["side"] for row in found["rows"]]
    assert sides == ["int3/row", *methods] * 2 and found["conditions"]["mixes"] == 3
    for row in found["rows"]:
        assert row["bits"] <= row["budget"] * (1 + 1e-9)
        assert (row["lost_after"] is None) == (row["side"] not in ("int3/row", "exact"))
        base = found["rows"][0]["held_out"]
        assert row["ratio"] == pytest.approx(row["held_out"] / base)
    assert found["rows"][1]["held_out"] < found["rows"][0]["held_out"]


def test_divergence_and_loss_are_those_of_the_text():
    size = allocation_quality.replace(allocation_quality.SIZE, **allocation_quality.QUICK, batch=8)
    text = "the small cat sat on the large mat, and the dog saw it. " * 400
    torch.manual_seed(1)
    task = allocation_quality.Words(size, text, 270)
    model, other = task.model().eval(), task.model().eval()
    divergence, loss = allocation_quality.tried(task, model, other)
    with torch.no_grad():
        p, q = (
            one(input_ids=task.validation).logits.double().log_softmax(2) for one in (model, other)
        )
    expected = (p.exp() * (p - q)).sum(2).mean().item()
    assert divergence == pytest.approx(expected, rel=1e-4)
    places = task.validation[:, 1:, None]
    assert loss == pytest.approx(-q[:, :-1].gather(2, places).mean().item(), rel=1e-5)
