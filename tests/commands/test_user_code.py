"""--import: files and modules of a user, what is said of wrong ones, and the commands that take
it."""

import json
import sys

import pytest
import torch

from lsq.commands.user_code import load
from lsq.fairseq.checkpoint import options_in
from lsq.quant.declared import declare
from lsq.quant.numbers import find_number
from tests.layers.test_clip_format import forgotten

SEVEN = """
import lsq

@lsq.number_format
def seven_of_a_file():
    return -4, -2, -1, 0, 1, 2, 4
"""
FORMAT = "seven_of_a_file/group16/bfloat16"


@pytest.fixture
def seven(tmp_path):
    path = tmp_path / "seven.py"
    path.write_text(SEVEN)
    return path


def test_a_file_runs_once(tmp_path):
    (tmp_path / "values_beside.py").write_text("VALUES = 0, 1")
    path = tmp_path / "counted.py"
    path.write_text(
        "import lsq, values_beside, sys\n"
        "sys.runs = getattr(sys, 'runs', 0) + 1\n"
        "@lsq.number_format\ndef counted():\n    return values_beside.VALUES"
    )
    before = list(sys.path)
    for _ in range(2):
        assert load(str(path)) == str(path)
    assert sys.runs == 1 and sys.path == before and find_number("counted").values == (0, 1)
    del sys.runs, sys.modules["values_beside"]


def test_a_module_of_the_current_folder(seven, monkeypatch):
    monkeypatch.chdir(seven.parent)
    seven.rename("seven_as_a_module.py")
    load("seven_as_a_module")
    assert find_number("seven_of_a_file").values == (-4, -2, -1, 0, 1, 2, 4)
    del sys.modules["seven_as_a_module"]


def test_what_cannot_be_imported_is_named(refused, tmp_path):
    path, weights = tmp_path / "wrong.py", tmp_path / "w.pt"
    torch.save({"w": torch.randn(32, 48)}, weights)
    for code, said in (
        ("1\n1 / 0", f"ZeroDivisionError: division by zero ({path}, line 2)"),
        ("def f(:\n", "SyntaxError: invalid syntax (wrong.py, line 1)"),
        ("import sys\nsys.exit(0)", f"SystemExit: 0 ({path}, line 2)"),
        ("import no_such", f"ModuleNotFoundError: No module named 'no_such' ({path}, line 1)"),
        (
            "import lsq\n@lsq.number_format(bits=9)\ndef f(code):\n    return 1",
            f"ValueError: bits is 9; it must be a whole number from 1 to 8 ({path}, line 2)",
        ),
    ):
        path.write_text(code)
        message = f"argument --import: {path} cannot be imported: {said}"
        refused(message, "formats", "--checkpoint", weights, "--import", path)
    missing = ("formats", "--checkpoint", weights, "--import")
    refused("no.py is not there; check the path", *missing, tmp_path / "no.py")
    refused("--import: no_such cannot be imported: ModuleNotFoundError", *missing, "no_such")


def test_errors_of_a_format_are_measured(lsq, seven, tmp_path):
    weights = tmp_path / "w.pt"
    torch.save({"w": torch.randn(32, 48)}, weights)
    given = ["--checkpoint", weights, "--formats", FORMAT, "--output", tmp_path / "out"]
    assert lsq("formats", *given)[0] == 2
    assert lsq("formats", *given, "--import", seven)[0] == 0
    assert json.loads((tmp_path / "out" / "formats.json").read_text())["formats"] == [FORMAT]


@pytest.mark.thorough
def test_a_training_goes_on_and_translates_without_the_file(
    lsq, lsq_train, prepared, seven, tmp_path
):
    """The checkpoint declares what it uses."""
    folder, other = tmp_path / "trained", tmp_path / "other.pt"
    gradients = ["--lsq-gradient-format", "seven_of_a_file/row"]
    given = ["--import", str(seven), "--lsq-weight-format", FORMAT, *gradients]
    lsq_train(folder, "--max-update", "2", *given)
    checkpoint = folder / "checkpoint_last.pt"
    assert "import" not in options_in(checkpoint, "model")
    forgotten("seven_of_a_file")
    lsq_train(folder, "--max-update", "3")
    assert options_in(checkpoint, "model")["lsq_weight_format"] == FORMAT
    for words in (
        ["generate", prepared.data, "--path", checkpoint, "--cpu", "--beam", "1", "--quiet"],
        ["convert-checkpoint", checkpoint, "--output", other, "--weight-format", "int8"],
    ):
        forgotten("seven_of_a_file")
        assert lsq(*words)[0] == 0
    state = torch.load(checkpoint)
    assert state["optimizer_history"][-1]["num_updates"] == 3
    forgotten("seven_of_a_file")
    declare("seven_of_a_file", (0, 1))
    status, _, said = lsq("generate", prepared.data, "--path", checkpoint, "--cpu")
    assert status == 2 and "seven_of_a_file has 2 values here and 7 in the checkpoint (" in said


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("sensitivity --model none --output out", "--formats"),
        ("convert-checkpoint none --output out", "--weight-format"),
        ("train-text --src none --tgt none --output out", "--lsq-weight-format"),
        ("compare --src none --tgt none --output out", "--lsq-weight-format"),
    ],
)
def test_commands_run_the_file_before_they_look_for_others(
    lsq, seven, monkeypatch, command, option
):
    monkeypatch.chdir(seven.parent)
    status, _, said = lsq(*command.split(), "--import", seven, option, FORMAT)
    assert status == 2 and said.count("none") == 1, said
    assert find_number("seven_of_a_file").values == (-4, -2, -1, 0, 1, 2, 4)
