"""`lsq formats`: of files, runs and folders of transformers'; what is written, and what is
refused."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import save_file

from lsq.commands import cli, formats
from lsq.files.lock import locked_folder

FORMATS = ["--formats", "int8/row", "nvfp4"]


@pytest.fixture
def lsq_formats(capsys):
    """lsq_formats(*options) -> (exit status, standard output, standard error)."""

    def lsq_formats(*options) -> tuple[int, str, str]:
        status = cli.main(["formats", "--quiet", *map(str, options)])
        return status, *capsys.readouterr()

    return lsq_formats


@pytest.fixture
def checkpoint(tmp_path):
    """A file with two weights, one of them broken, and a bias."""
    broken = torch.ones(3, 4)
    broken[0, 0] = torch.nan
    tensors = {
        "first.weight": torch.randn(40, 64),
        "second.weight": broken,
        "first.bias": torch.ones(40),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_checkpoint_is_measured_and_written(lsq_formats, checkpoint, tmp_path):
    folder = tmp_path / "out"
    status, said, _ = lsq_formats(
        "--checkpoint", checkpoint, *FORMATS, "--clip", "mse", "--output", folder
    )
    assert status == 0 and "weights: medians of 1, clips by mse" in said
    assert "not measured: weight second.weight: 1 of 12 values are NaN or infinite" in said
    assert sorted(path.name for path in folder.iterdir()) == sorted(formats.OUTPUTS)
    found = json.loads((folder / formats.JSON).read_text())
    assert found["source"] == str(checkpoint) and found["formats"] == FORMATS[1:]
    assert [one["name"] for one in found["tensors"]] == ["first.weight", "second.weight"]
    assert (folder / formats.TABLE).read_text().count("| int8/row ") == 1
    assert (folder / formats.PICTURE).read_bytes().startswith(b"\x89PNG")
    status, _, said = lsq_formats("--checkpoint", checkpoint, "--output", folder)
    assert (
        status == 2
        and "formats.json is there already; choose another --output, or give --overwrite" in said
    )
    options = ["--output", folder, "--overwrite", "--tensors", "first*"]
    assert lsq_formats("--checkpoint", checkpoint, *FORMATS, *options)[0] == 0
    assert len(json.loads((folder / formats.JSON).read_text())["tensors"]) == 1


@pytest.mark.thorough
def test_a_run_is_measured_by_its_checkpoint_and_by_a_batch(lsq_formats, output):
    status, said, _ = lsq_formats("--checkpoint", output, *FORMATS)
    assert status == 0 and "weights: medians of" in said and "activations" not in said
    status, said, _ = lsq_formats("--model", output / "int8", *FORMATS, "--words", "40")
    assert status == 0 and " words of its validation data" in said
    assert all(
        f"{kind}: medians of 12, " in said for kind in ("weights", "activations", "gradients")
    )


def test_nothing_to_measure_is_an_error(lsq_formats, checkpoint, tmp_path):
    options = ["--tensors", "second*", "--output", tmp_path / "out"]
    status, _, said = lsq_formats("--checkpoint", checkpoint, *options)
    assert (
        status == 2
        and "nothing could be measured in" in said
        and "second.weight: 1 of 12 values are NaN" in said
    )
    assert not (tmp_path / "out").exists()


def test_mistakes_are_one_line(lsq_formats, checkpoint, tmp_path):
    for options, message in (
        (
            ["--checkpoint", checkpoint, "--formats", "mxfp5"],
            "no number format is called 'mxfp5' (did you mean mxfp4",
        ),
        (
            ["--checkpoint", checkpoint, "--tensors", "third"],
            "no tensor is called 'third'; there are first.weight, ",
        ),
        (["--checkpoint", tmp_path / "none"], "none is not there; check the path"),
        (["--checkpoint", checkpoint, "--text", checkpoint], "--text goes with --model"),
        (["--checkpoint", checkpoint, "--words", "100"], "--words goes with --model"),
        (
            ["--model", checkpoint],
            f"for its weights give --checkpoint {checkpoint}, or, if it is a checkpoint of",
        ),
        (["--checkpoint", checkpoint, "--output", tmp_path / "a" / "b"], "there is no folder"),
        (
            ["--checkpoint", checkpoint, "--output", checkpoint],
            "model.safetensors is a file; give a folder",
        ),
        (
            ["--checkpoint", checkpoint, "--clip", "percentile", "--percentile", "0"],
            "percentile is 0.0; it must be",
        ),
    ):
        status, _, said = lsq_formats(*options)
        assert (
            status == 2
            and said.startswith("lsq formats: error: ")
            and message in said
            and said.count("\n") == 1
        )


def test_a_second_writer_is_refused(lsq_formats, checkpoint, tmp_path):
    folder = tmp_path / "out"
    with locked_folder(folder, "choose another"):
        status, _, said = lsq_formats("--checkpoint", checkpoint, *FORMATS, "--output", folder)
    assert (
        status == 1
        and "is writing into" in said
        and "wait for it, or choose another --output" in said
    )
    assert not folder.exists()


def test_an_interruption_leaves_nothing(lsq_formats, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(
        formats.files, "write_text", lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    status, _, said = lsq_formats(
        "--checkpoint", checkpoint, *FORMATS, "--output", tmp_path / "out"
    )
    assert status == 128 + signal.SIGTERM and "stopped by SIGTERM" in said
    assert not (tmp_path / "out" / formats.JSON).exists()
