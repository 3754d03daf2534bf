"""`lsq export`: a run or a checkpoint for each target, and what is refused."""

from dataclasses import replace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.tasks.language_modeling import LanguageModelingTask

from lsq import Translator
from lsq.commands import export, run_files, train
from lsq.commands.logs import logging_to
from lsq.files.lock import locked_file
from lsq.serving import model_file
from lsq.serving.decoding_model import model_of
from tests.commands.conftest import files_in
from tests.fairseq.conftest import corpus  # noqa: F401

CHECKPOINT = "model/checkpoint_best.pt"
LANGUAGE_MODEL = (
    "--arch lsq_transformer_lm --decoder-embed-dim 16 --decoder-ffn-embed-dim 32"
    " --decoder-attention-heads 2 --cpu --decoder-layers 1 --tokens-per-sample 16"
    " --sample-break-mode eos --max-tokens 120 --max-update 2 --num-workers 0 --optimizer adam"
    " --lr 0.001 --no-epoch-checkpoints"
).split()


@pytest.fixture
def lsq_export(lsq):
    """lsq_export(model, target, path, *options) -> (exit status, what is said)."""

    def lsq_export(model, target, path, *options) -> tuple[int, str]:
        status, out, err = lsq("export", model, "--to", target, "--output", path, *options)
        return status, err or out

    return lsq_export


@pytest.fixture
def export_refused(refused):
    return lambda message, model, target, path, *options: refused(
        message, "export", model, "--to", target, "--output", path, *options
    )


def same(model, tensors) -> bool:
    expected = model_of(model).tensors
    return expected.keys() == tensors.keys() and all(
        torch.equal(expected[name], tensors[name]) for name in expected
    )


def test_a_run_and_a_checkpoint_for_lsq(lsq_export, export_refused, output, tmp_path):
    path = tmp_path / "model.safetensors"
    status, said = lsq_export(output, "lsq", path)
    assert status == 0 and said == f"{path}: {path.stat().st_size / 1e6:.1f} MB for lsq\n"
    source = run_files.find(output / "int8")
    found, exported = run_files.load(source), model_file.read(path)
    assert same(found.model, exported.model.tensors)
    assert list(exported.source) == found.source.symbols
    assert list(exported.target) == found.target.symbols
    assert exported.subwords == source.subwords.read_bytes()
    assert exported.trained_length == 40
    checkpoint, path = output / "int8" / CHECKPOINT, tmp_path / "other"
    message = "if it is a checkpoint, give the folder of its dictionaries"
    export_refused(message, checkpoint, "lsq", path)
    assert lsq_export(checkpoint, "lsq", path, "--data", output / "data")[0] == 0
    exported = model_file.read(path)
    assert same(found.model, exported.model.tensors) and exported.subwords is None


def test_weights_of_4_bits(lsq_export, export_refused, output, tmp_path):
    whole, narrow, again = (tmp_path / name for name in ("whole", "narrow", "again"))
    assert lsq_export(output, "lsq", whole)[0] == 0
    assert lsq_export(output, "lsq", narrow, "--bits", 4)[0] == 0
    assert lsq_export(whole, "lsq", again, "--bits", 4)[0] == 0
    before, after, same_again = (model_file.read(path).model for path in (whole, narrow, again))
    assert all(
        torch.equal(tensor, same_again.tensors[name]) for name, tensor in after.tensors.items()
    )
    name = "decoder.layers.0.feed_forward.fc2_weight.codes"
    form = after.architecture.decoder.config.quant.weights
    rows, inner = before.tensors[name].shape
    assert form.name == "int4" and after.tensors[name].shape == (rows, form.stored_columns(inner))
    assert len(list(Translator(narrow).translate(["a b c"]))) == 1
    other, reason = tmp_path / "other", "--bits 4 is for files that lsq reads, not for fairseq"
    export_refused(reason, output, "fairseq", other, "--bits", 4)
    export_refused("is exported for lsq already", narrow, "lsq", other)
    assert not other.exists()


def test_a_mix_of_formats(lsq, lsq_export, output, tmp_path):
    checkpoint, path, narrow = (tmp_path / name for name in ("mixed.pt", "mixed", "narrow"))
    mix = "int4,*fc2*=int8,*qkv*=int3/row,encoder.layers.0.*=int2/row"
    given = "--output", checkpoint, "--weight-format", mix
    assert lsq("convert-checkpoint", output / "int8" / CHECKPOINT, *given)[0] == 0
    assert lsq_export(checkpoint, "lsq", path, "--data", output / "data")[0] == 0
    found = run_files.load(run_files.find(checkpoint, output / "data"))
    exported = model_file.read(path).model
    assert same(found.model, exported.tensors)
    assert exported.architecture.encoder.config.quant.weight_format == "int2/row"
    lines = ["a b c", "one red cat", "two black dog"]
    trained, file = Translator(checkpoint, data=output / "data"), Translator(path)
    options = replace(file.options, beam=3, nbest=2, max_len_b=9)
    assert file.translate(lines, options) == trained.translate(lines, options)
    assert lsq_export(path, "lsq", narrow, "--bits", 4)[0] == 0
    quant = model_file.read(narrow).model.architecture.decoder.config.quant
    assert quant.weight_format == "int4,decoder.layers.0.self_attn.qkv_weight=int3/row"
    assert len(list(Translator(narrow).translate(lines))) == 3


def test_for_fairseq(lsq_export, export_refused, output, tmp_path):
    path = tmp_path / "model.pt"
    assert lsq_export(output, "fairseq", path)[0] == 0
    (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], {"data": str(output / "data")}
    )
    assert type(model) is TransformerModel
    assert (task.cfg.source_lang, task.cfg.target_lang) == ("src", "tgt")
    message = "is of fairseq's own TransformerModel; give one of lsq's"
    export_refused(message, path, "lsq", tmp_path / "again", "--data", output / "data")


def test_for_ctranslate2_from_a_run_and_from_a_file(lsq_export, export_refused, output, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2", reason="pip install '.[ctranslate2]'")
    for model, target, name in (
        (output, "ctranslate2", "one"),
        (output, "lsq", "file"),
        (tmp_path / "file", "ctranslate2", "two"),
    ):
        assert lsq_export(model, target, tmp_path / name)[0] == 0
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")
    assert (tmp_path / "one" / "sentencepiece.model").exists()
    (found,) = ctranslate2.Translator(str(tmp_path / "one")).translate_batch(
        [["\u2581", "r"]], max_decoding_length=9
    )
    assert found.hypotheses
    message = "is there already; choose another, or replace it with --overwrite"
    export_refused(message, output, "ctranslate2", tmp_path / "one")
    assert lsq_export(output, "ctranslate2", tmp_path / "one", "--overwrite")[0] == 0
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")
    assert lsq_export(tmp_path / "file", "ctranslate2", tmp_path / "x", "--data", tmp_path)[0] == 2


def test_a_language_model(lsq_export, corpus, tmp_path):  # noqa: F811
    with logging_to(tmp_path / "train.log"):
        train.run([str(corpus), "--save-dir", str(tmp_path), *LANGUAGE_MODEL])
    given = tmp_path / "checkpoint_last.pt", ["--data", corpus]
    for target in ("lsq", "fairseq"):
        assert lsq_export(given[0], target, tmp_path / target, *given[1])[0] == 0
    found = run_files.load(run_files.find(given[0], corpus))
    exported = model_file.read(tmp_path / "lsq")
    assert same(found.model, exported.model.tensors) and exported.source is None
    assert list(exported.target) == found.target.symbols
    paths = [str(tmp_path / "fairseq")]
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(paths, {"data": str(corpus)})
    assert type(model) is TransformerLanguageModel and type(task) is LanguageModelingTask


@pytest.mark.parametrize("target", export.TARGETS)
def test_formats_by_patterns_are_refused_as_they_were_given(
    export_refused, output, tmp_path, monkeypatch, target
):
    path, formats = tmp_path / "mixed.pt", "int8,*fc2*=nvfp4,encoder.*=float32"
    state = torch.load(output / "int8" / CHECKPOINT)
    state["cfg"]["model"].lsq_weight_format = formats
    torch.save(state, path)
    monkeypatch.setattr(run_files, "load", None)  # nothing is loaded before
    message = "*fc2* in nvfp4, activations in int8, gradients in int8; models are kept as codes"
    export_refused(message, path, target, tmp_path / "out", "--data", output / "data")
    assert files_in(tmp_path).keys() == {"mixed.pt"}


@pytest.mark.parametrize("target", export.TARGETS)
def test_outputs_that_are_refused(export_refused, tmp_path, target):
    (tmp_path / "model.pt").write_bytes(b"PK")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"mine")
    (tmp_path / "text").write_text("export {mine}\n" * 9)
    before = files_in(tmp_path)
    part, other = "is what is exported, or part of it", f"was not exported for {target}"
    for path, message, *options in (
        ("none/out", f"there is no folder {tmp_path / 'none'}; make it first"),
        ("model.pt", "is there already; choose another"),
        ("model.pt", f"{part}; choose another", "--overwrite"),
        ("folder", f"{other}; choose another", "--overwrite"),
        ("text", f"{other}; choose another", "--overwrite"),
        (".", f"{part}; choose another", "--overwrite"),
    ):
        export_refused(message, tmp_path / "model.pt", target, tmp_path / path, *options)
    assert files_in(tmp_path) == before


def test_what_was_exported_is_replaced_and_never_the_run(
    lsq_export, export_refused, output, tmp_path
):
    path, before = tmp_path / "made", files_in(output)
    with locked_file(path, ""):
        status, said = lsq_export(output, "lsq", path)
    assert status == 1 and list(tmp_path.iterdir()) == []
    assert f"is writing into {path}; wait for it, or choose another --output" in said
    for target, other in (("lsq", "fairseq"), ("fairseq", "lsq")):
        assert lsq_export(output, target, path)[0] == 0
        assert lsq_export(output, target, path, "--overwrite")[0] == 0
        assert lsq_export(output, other, path, "--overwrite")[0] == 2
        path.unlink()
        message, checkpoint = "is what is exported, or part of it", output / "int8" / CHECKPOINT
        export_refused(message, output, target, checkpoint, "--overwrite")
    assert files_in(output) == before


@pytest.mark.parametrize("target", export.TARGETS)
def test_models_that_are_refused(export_refused, output, tmp_path, target):
    made = tmp_path / "made"
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes((output / "int8" / CHECKPOINT).read_bytes()[:-100])
    exported = tmp_path / "exported"
    exported.write_bytes((30).to_bytes(8, "little") + b'{"x": ' + bytes(50))
    before = files_in(tmp_path)
    of_file, data = "exported for lsq already", ("--data", output / "data")
    if target == "ctranslate2":
        of_file = "is damaged or no model of `lsq export`"
    for model, message, *options in (
        (tmp_path / "none", "is not there"),
        (tmp_path, "is no finished run of lsq train-text"),
        (output, "has its data in it; leave --data out", *data),
        (damaged, "damaged.pt is damaged", *data),
        (output / "int8" / CHECKPOINT, "has no dictionaries", "--data", tmp_path),
        (exported, of_file),
    ):
        export_refused(message, model, target, made, *options)
    assert files_in(tmp_path) == before
