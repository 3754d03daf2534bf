"""Tensors from files of every kind, and damaged ones."""

import collections

import pytest
import torch
from safetensors.torch import save_file

from lsq.commands import run_files, trained
from lsq.commands.tensor_files import tensors_in
from lsq.serving import model_file
from lsq.serving.decoding_model import model_of
from lsq.serving.model_file import ExportedModel

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


def test_nested_dicts_and_a_tensor(tmp_path):
    torch.save({"net": TENSORS, "step": 4}, tmp_path / "model.pt")
    assert same(
        tensors_in(tmp_path / "model.pt"),
        {f"net.{name}": tensor for name, tensor in TENSORS.items()},
    )
    torch.save(TENSORS["layer.bias"], tmp_path / "model.pt")
    assert list(tensors_in(tmp_path / "model.pt")) == ["tensor"]


def test_safetensors_and_folders(tmp_path):
    for number, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, tmp_path / f"model-{number}.safetensors")
    assert same(
        tensors_in(tmp_path / "model-0.safetensors"), {"layer.weight": TENSORS["layer.weight"]}
    )
    assert same(tensors_in(tmp_path), TENSORS)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(
        ValueError, match=r"other has no \*.safetensors or pytorch_model\*.bin in it"
    ):
        tensors_in(other)
    torch.save(TENSORS, other / "pytorch_model.bin")
    assert same(tensors_in(other), TENSORS)


@pytest.mark.thorough
def test_a_checkpoint_of_fairseq_and_an_exported_file(output, tmp_path):
    source = run_files.find(output)
    found = trained.load(source)
    tensors = tensors_in(source.checkpoint)
    (name,) = [
        name
        for name in tensors
        if name.startswith("encoder.layers.0.") and tensors[name].shape == (32, 16)
    ]
    assert torch.equal(tensors[name], found.model.state_dict()[name])
    exported = ExportedModel(
        model=model_of(found.model),
        source=tuple(found.source.symbols),
        target=tuple(found.target.symbols),
    )
    model_file.write(tmp_path / "exported", exported)
    decoded = tensors_in(tmp_path / "exported")
    weight = found.model.state_dict()[name]
    assert decoded[name].shape == weight.shape
    assert (decoded[name] - weight).abs().max() < 0.05 * weight.abs().max()
    assert not any(name.endswith((".codes", ".scale")) for name in decoded)


class Stranger:
    """What nobody knows."""


def test_what_is_refused(tmp_path):
    path = tmp_path / "model.pt"
    for content, message in (
        (b"", "is empty"),
        (
            b"no tensors in here",
            "is damaged, or no file of tensors .*: it was not written by torch.save; save the st",
        ),
        (b"\x10\0\0\0\0\0\0\0{bad", "is damaged or no file of safetensors"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            tensors_in(path)
    for zipped in (True, False):
        torch.save(
            {"model": TENSORS, "who": Stranger()}, path, _use_new_zipfile_serialization=zipped
        )
        with pytest.raises(
            ValueError, match="holds a tests.commands.test_tensor_files.Stranger, and making"
        ) as refused:
            tensors_in(path)
        assert "weights_only" not in str(refused.value) and "still be loaded" not in str(
            refused.value
        )
    torch.save(TENSORS, path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="is damaged"):
        tensors_in(path)
    with pytest.raises(FileNotFoundError):
        tensors_in(tmp_path / "nothing")
