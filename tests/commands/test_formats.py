"""`lsq formats`: of files of every kind, runs and folders; what is written and refused."""

import collections
import json
import os
import signal

import pytest
import torch
from safetensors.torch import save_file

from lsq.commands import formats, run_files
from lsq.commands.formats import tensors_in
from lsq.files.lock import locked_folder
from lsq.serving import model_file
from tests.serving.test_model_file import exported

FORMATS = ["--formats", "int8/row", "nvfp4"]


@pytest.fixture
def lsq_formats(lsq):
    return lambda *options: lsq("formats", "--quiet", *options)


@pytest.fixture
def checkpoint(tmp_path):
    """A file with two weights, one of them broken, and a bias."""
    broken = torch.ones(3, 4)
    broken[0, 0] = torch.nan
    tensors = {"first.weight": torch.randn(40, 64), "second.weight": broken}
    save_file(tensors | {"first.bias": torch.ones(40)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_checkpoint_is_measured_and_written(lsq_formats, refused, checkpoint, tmp_path):
    folder = tmp_path / "out"
    options = [*FORMATS, "--clip", "mse", "--output", folder]
    status, said, _ = lsq_formats("--checkpoint", checkpoint, *options)
    assert status == 0 and "weights: medians of 1, clips by mse" in said
    assert "not measured: weight second.weight: 1 of 12 values are NaN or infinite" in said
    assert sorted(path.name for path in folder.iterdir()) == sorted(formats.OUTPUTS)
    found = json.loads((folder / formats.JSON).read_text())
    assert found["source"] == str(checkpoint) and found["formats"] == FORMATS[1:]
    assert [one["name"] for one in found["tensors"]] == ["first.weight", "second.weight"]
    assert (folder / formats.TABLE).read_text().count("| int8/row ") == 1
    assert (folder / formats.PICTURE).read_bytes().startswith(b"\x89PNG")
    message = "formats.json is there already; choose another --output, or give --overwrite"
    refused(message, "formats", "--checkpoint", checkpoint, "--output", folder)
    options = ["--output", folder, "--overwrite", "--tensors", "first*"]
    assert lsq_formats("--checkpoint", checkpoint, *FORMATS, *options)[0] == 0
    assert len(json.loads((folder / formats.JSON).read_text())["tensors"]) == 1


@pytest.mark.thorough
def test_a_run_is_measured_by_its_checkpoint_and_by_a_batch(lsq_formats, output):
    status, said, _ = lsq_formats("--checkpoint", output, *FORMATS)
    assert status == 0 and "weights: medians of" in said and "activations" not in said
    status, said, _ = lsq_formats("--model", output / "int8", *FORMATS, "--words", "40")
    assert status == 0 and " words of its validation data" in said
    for kind in ("weights", "activations", "gradients"):
        assert f"{kind}: medians of 12, " in said


def test_mistakes_are_one_line(refused, checkpoint, tmp_path):
    folder = tmp_path / "out"
    for message, *options in (
        ("no number format is called 'mxfp5' (did you mean mxfp4", "--formats", "mxfp5"),
        ("no tensor is called 'third'; there are first.weight, ", "--tensors", "third"),
        ("--text goes with --model", "--text", checkpoint),
        ("--words goes with --model", "--words", "100"),
        ("there is no folder", "--output", tmp_path / "a" / "b"),
        ("model.safetensors is a file; give a folder", "--output", checkpoint),
        ("'0' is not a whole number above 0", "--sample", "0"),
    ):
        refused(message, "formats", "--checkpoint", checkpoint, *options)
    message = f"for its weights give --checkpoint {checkpoint}, or, if it is a checkpoint of"
    refused(message, "formats", "--model", checkpoint)
    refused("none is not there; check the path", "formats", "--checkpoint", tmp_path / "none")
    for given in ((), ("--checkpoint", checkpoint, "--model", checkpoint)):
        refused("give one of --checkpoint and --model", "formats", *given)
    assert not folder.exists()


def test_what_stops_it_leaves_nothing(lsq_formats, checkpoint, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    given = ("--checkpoint", checkpoint, *FORMATS, "--output", folder)
    status, _, said = lsq_formats(*given, "--tensors", "second*")
    assert status == 2 and "nothing could be measured in" in said
    assert "second.weight: 1 of 12 values are NaN" in said and not folder.exists()
    with locked_folder(folder, "choose another"):
        status, _, said = lsq_formats(*given)
    assert status == 1 and "is writing into" in said and not folder.exists()
    assert "wait for it, or choose another --output" in said
    stop = lambda *_: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    monkeypatch.setattr(formats.files, "write_text", stop)
    status, _, said = lsq_formats(*given)
    assert status == 128 + signal.SIGTERM and "stopped by SIGTERM" in said
    assert not (folder / formats.JSON).exists()


# Tensors from files

TENSORS = {"layer.weight": torch.arange(6.0).view(2, 3), "layer.bias": torch.ones(2)}


def same(found: dict, expected: dict) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize(
    "wrapped",
    [
        dict,
        collections.OrderedDict,
        lambda one: {"model": one, "optimizer": {0: one}},
        lambda one: {"state_dict": {"model": one}, "epoch": 3},
    ],
)
def test_files_of_pytorch(tmp_path, wrapped):
    for zipped in (True, False):
        torch.save(wrapped(TENSORS), tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
        assert same(tensors_in(tmp_path / "model.pt"), TENSORS)
    torch.save({"net": wrapped(TENSORS), "step": 4}, tmp_path / "model.pt")
    assert all(name.startswith("net.") for name in tensors_in(tmp_path / "model.pt"))
    torch.save(TENSORS["layer.bias"], tmp_path / "model.pt")
    assert list(tensors_in(tmp_path / "model.pt")) == ["tensor"]


def test_safetensors_and_folders(tmp_path):
    for number, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, tmp_path / f"model-{number}.safetensors")
    one = {"layer.weight": TENSORS["layer.weight"]}
    assert same(tensors_in(tmp_path / "model-0.safetensors"), one)
    assert same(tensors_in(tmp_path), TENSORS)
    other = tmp_path / "other"
    other.mkdir()
    message = r"other has no \*.safetensors or pytorch_model\*.bin in it"
    with pytest.raises(ValueError, match=message):
        tensors_in(other)
    torch.save(TENSORS, other / "pytorch_model.bin")
    assert same(tensors_in(other), TENSORS)


@pytest.mark.thorough
def test_a_checkpoint_of_fairseq(output):
    source = run_files.find(output)
    state, tensors = run_files.load(source).model.state_dict(), tensors_in(source.checkpoint)
    weights = {name: one for name, one in tensors.items() if one.dim() > 1}
    assert len(weights) > 8
    assert all(torch.equal(tensor, state[name]) for name, tensor in weights.items())


class Stranger:
    """What nobody knows."""


def test_files_that_are_refused(tmp_path):
    path = tmp_path / "model.pt"
    foreign = "is damaged, or no file of tensors .*: it was not written by torch.save; save the st"
    for content, message in (
        (b"", "is empty"),
        (b"no tensors in here", foreign),
        (b"\x10\0\0\0\0\0\0\0{bad", "is damaged or no file of safetensors"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            tensors_in(path)
    for zipped in (True, False):
        state = {"model": TENSORS, "who": Stranger()}
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(
            ValueError, match="holds a tests.commands.test_formats.Stranger, and making"
        ) as refused:
            tensors_in(path)
        said = str(refused.value)
        assert "weights_only" not in said and "still be loaded" not in said
    model_file.write(tmp_path / "exported", exported())
    with pytest.raises(ValueError, match="is exported, so its weights are rounded; give the ch"):
        tensors_in(tmp_path / "exported")
    torch.save(TENSORS, path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="is damaged"):
        tensors_in(path)
    with pytest.raises(FileNotFoundError):
        tensors_in(tmp_path / "nothing")
