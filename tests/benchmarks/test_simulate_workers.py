"""The simulation's figures are kept, found again, and not mixed with those of other options."""

import json

import pytest
from simulate_workers import SCHEMES, Store, main


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the script on tiny shapes; returns the content of its file."""

    def call(*arguments: str) -> dict:
        file = tmp_path / "figures.json"
        monkeypatch.setattr(
            "sys.argv",
            ["simulate_workers.py", "--quick", "--quiet", "--json", str(file), *arguments],
        )
        main()
        return json.loads(file.read_text())

    return call


def test_what_is_there_is_not_made_again(run, monkeypatch):
    first = run("--train", "int8")
    assert [row["workers"] for row in first["errors"]] == [2, 16]
    assert (
        "int8_hier" not in first["errors"][0]["errors"]
        and "int8_hier" in first["errors"][1]["errors"]
    )
    assert [row["scheme"] for row in first["trainings"]] == ["exact", "int8"]
    monkeypatch.setattr("simulate_workers.relative_error", None)  # would fail if it were called
    second = run("--train", "int8", "bf16")
    assert second["errors"] == first["errors"]
    assert (
        second["trainings"][:2] == first["trainings"] and second["trainings"][2]["scheme"] == "bf16"
    )


def test_other_options_need_another_file(tmp_path):
    path = tmp_path / "figures.json"
    Store(path, {"hidden": 32}, {}).add("errors", {"workers": 2})
    with pytest.raises(ValueError, match="other options"):
        Store(path, {"hidden": 64}, {})


def test_schemes_stop_where_lsq_does():
    assert SCHEMES["gcq"](128, 64) is None
    assert SCHEMES["int8_hier"](8, 64) is None


def test_the_last_line_is_the_file(run, capsys, tmp_path):
    content = run()
    for _ in range(2):  # made, and found again
        last = capsys.readouterr().out.rstrip("\n").split("\n")[-1]
        assert last + "\n" == (tmp_path / "figures.json").read_text()
        assert json.loads(last) == content and content["benchmark"] == "simulated_workers"
        assert {"device", "processor", "baseline"} <= set(content["conditions"])
        run()
