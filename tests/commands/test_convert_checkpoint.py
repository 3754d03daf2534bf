"""`lsq convert-checkpoint`: files and folders, whole or not at all, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lsq.models
from lsq.layers import clip_format
from lsq.models.sparsity import sparsity_of

CHECKPOINT = "int8/model/checkpoint_best.pt"


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def convert(lsq):

    def convert(checkpoint, path, *options) -> str:
        status, out, err = lsq("convert-checkpoint", checkpoint, "--output", path, *options)
        assert status == 0, err
        return out

    return convert


@pytest.fixture
def not_converted(refused):
    return lambda message, checkpoint, path, *options: refused(
        message, "convert-checkpoint", checkpoint, "--output", path, *options
    )


@pytest.mark.thorough
def test_a_run_in_another_format_is_exported_and_translates(convert, lsq, output, tmp_path):
    path = tmp_path / "int4.pt"
    before = (output / CHECKPOINT).read_bytes()
    said = convert(output / CHECKPOINT, path, "--weight-format", "int4")
    assert "clips of 12 weights are measured anew, those of activations are kept" in said
    assert (output / CHECKPOINT).read_bytes() == before and names_in(tmp_path) == {"int4.pt"}
    assert torch.load(path)["cfg"]["model"].lsq_weight_format == "int4"
    exported = tmp_path / "model.safetensors"
    given = ["--to", "lsq", "--output", exported, "--data", output / "data"]
    assert lsq("export", path, *given)[0] == 0 and exported.exists()


def test_what_is_refused(convert, not_converted, output, tmp_path):
    checkpoint, path, training = output / CHECKPOINT, tmp_path / "other.pt", output / "int8"
    (tmp_path / "broken.pt").write_bytes(b"nothing")
    own = f"is the folder of a training; give its checkpoint, {checkpoint}"
    part, bits = "is what is converted, or part of it", ("--bits", 4)
    for message, *given in (
        ("say what shall be another: --weight-format, --activation-format, ", checkpoint, path),
        ("weight_format is 'int5'", checkpoint, path, "--weight-format", "int5"),
        ("has weight_format='int8' already", checkpoint, path, "--weight-format", "int8"),
        ("is not there", tmp_path / "none.pt", path, *bits),
        (part, checkpoint, checkpoint, *bits, "--overwrite"),
        ("there is no folder", checkpoint, tmp_path / "no" / "other.pt", *bits),
        (own, training, path, *bits),
        ("is not a checkpoint of fairseq's", tmp_path / "broken.pt", path, *bits),
    ):
        not_converted(message, *given)
    path.write_text("mine")
    not_converted("is there already; choose another, or replace it", checkpoint, path, *bits)
    assert path.read_text() == "mine"
    convert(checkpoint, path, *bits, "--overwrite")
    assert names_in(tmp_path) == {"broken.pt", "other.pt"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of a tiny GPT-2 of transformers that was trained a step, and its inputs."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=96, n_positions=16)
    config.bos_token_id = config.eos_token_id = 1
    model = transformers.GPT2LMHeadModel(config)
    lsq.convert(model)
    words = torch.randint(0, 96, (2, 16))
    model(input_ids=words, labels=words).loss.backward()
    model.save_pretrained(folder)
    lsq.models.save_clips(model, folder)
    (folder / "trainer_state.json").write_text("{}")
    return folder, words


def test_a_folder_of_transformers(convert, folder, tmp_path):
    source, words = folder
    said = convert(source, tmp_path / "tensor", "--weight-granularity", "tensor")
    assert "clips of 5 weights are measured anew, those of activations are kept" in said
    assert names_in(tmp_path) == {"tensor"}
    assert names_in(source) - names_in(tmp_path / "tensor") == {"trainer_state.json"}
    before, after = (load_file(one / "lsq.safetensors") for one in (source, tmp_path / "tensor"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(name.endswith(("weight_clip", "format")) for name in changed) and len(changed) > 4
    read = clip_format.read(after["transformer.h.0.format"], "format")
    formats = {"weight_format": "int8", "activation_format": "int8"}
    assert read == formats | {"weight_granularity": "tensor", "bits": 8}
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "tensor")
    lsq.convert(model, lsq.QuantConfig(weight_granularity="tensor"))
    lsq.models.load_clips(model, tmp_path / "tensor")
    assert model.eval()(input_ids=words).logits.isfinite().all()
    lsq.revert(model)
    lsq.convert(model)
    with pytest.raises(ValueError, match="trained with weight_granularity='tensor'"):
        lsq.models.load_clips(model, tmp_path / "tensor")


def write_folder(path: Path, source: Path, **quant) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel.from_pretrained(source)
    lsq.convert(model, lsq.QuantConfig(**quant))
    if quant.get("sparsity"):
        sparsity_of(model)
    words = torch.arange(2, 18).view(1, 16)
    model.train()(input_ids=words, labels=words)
    model.save_pretrained(path)
    lsq.models.save_clips(model, path)
    return model


def test_masks_of_a_folder_stay(convert, folder, tmp_path):
    transformers, before = pytest.importorskip("transformers"), tmp_path / "before"
    sparse = write_folder(before, folder[0], sparsity="2:4")
    convert(before, tmp_path / "after", "--weight-format", "nvfp4")
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "after")
    lsq.convert(model, lsq.QuantConfig(sparsity="2:4", weight_format="nvfp4"))
    lsq.models.load_clips(model, tmp_path / "after")
    layer, other = (one.transformer.h[0] for one in (model, sparse))
    assert layer.weight_masks.active
    for name in layer.weight_masks.names:
        assert layer.weight_masks.mask(layer, name).equal(other.weight_masks.mask(other, name))


def test_formats_without_clips(convert, folder, tmp_path):
    floats = {"weight_format": "float32", "activation_format": "float32"}
    write_folder(tmp_path / "before", folder[0], **floats)
    formats = "--weight-format", "int8", "--activation-format", "int8"
    said = convert(tmp_path / "before", tmp_path / "after", *formats)
    assert "clips of 5 weights are measured anew, those of activations are measured in" in said
    said = convert(folder[0], tmp_path / "floats", "--weight-format", "float32")
    assert "no weight has a clip in this format, those of activations are kept" in said


@pytest.mark.parametrize("fused", [True, False])
def test_a_mixture_for_layers_by_themselves_alone(convert, request, fused, tmp_path):
    transformers, before = pytest.importorskip("transformers"), tmp_path / "before"
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64}
    config = transformers.BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.BertForMaskedLM(config).train()
    lsq.convert(model, fused=fused)
    model(input_ids=torch.arange(2, 18).view(1, 16))
    model.save_pretrained(before)
    lsq.models.save_clips(model, before)
    given = before, tmp_path / "after", "--weight-format", "int8,*query*=int4"
    if fused:
        run = request.getfixturevalue("lsq")  # a name that the package has here
        status, _, said = run("convert-checkpoint", *given[:1], "--output", *given[1:])
        assert status == 2
        assert "int4 to bert.encoder.layer.0.attention.self.query.weight, int8 to " in said
        assert "give all of them one format, or call lsq.convert with fused=False" in said
    else:
        convert(*given)
        lsq.revert(model)
        lsq.convert(model, lsq.QuantConfig(weight_format="int8,*query*=int4"), fused=False)
        lsq.models.load_clips(model, tmp_path / "after")


def test_folders_that_are_refused(not_converted, folder, tmp_path):
    source, other = folder[0], tmp_path / "other"
    gradients = "--gradient-format", "float32"
    not_converted("has bits=8 already", source, other, "--bits", 8)
    not_converted("has bits=8 already", source, other, "--bits", 8, *gradients)
    not_converted("says nothing of gradient_format", source, other, *gradients)
    not_converted("is what is converted, or part of it", source, source / "other", "--bits", 4)
    nothing = "has nothing to convert: there is no lsq.safetensors, in which LsqCallback and "
    not_converted(f"{tmp_path} {nothing}", tmp_path, tmp_path.parent / "other", "--bits", 4)
    assert not other.exists()
