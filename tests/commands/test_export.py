"""`lsq export`: a run or a checkpoint for each target, and what is refused."""

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.tasks.language_modeling import LanguageModelingTask

from lsq import Translator
from lsq.commands import cli, export, run_files, train, trained
from lsq.commands.logs import logging_to
from lsq.files.lock import locked_file
from lsq.serving import model_file
from lsq.serving.decoding_model import model_of
from tests.commands.small_runs import files_in
from tests.fairseq.conftest import corpus  # noqa: F401

CHECKPOINT = "model/checkpoint_best.pt"
LANGUAGE_MODEL = (
    "--arch lsq_transformer_lm --decoder-embed-dim 16 --decoder-ffn-embed-dim 32"
    " --decoder-attention-heads 2 --cpu "
    "--decoder-layers 1 --tokens-per-sample 16 --sample-break-mode eos --max-tokens 120"
    " --max-update 2 --num-workers 0 "
    "--optimizer adam --lr 0.001 --no-epoch-checkpoints"
).split()


@pytest.fixture
def lsq_export(capsys):
    """lsq_export(model, target, path, *options) -> (exit status, what is said)."""

    def lsq_export(model, target, path, *options) -> tuple[int, str]:
        given = ["export", str(model), "--to", target, "--output", str(path), *map(str, options)]
        status = cli.main(given)
        said = capsys.readouterr()
        return status, said.err or said.out

    return lsq_export


def same(model, tensors) -> bool:
    expected = model_of(model).tensors
    return expected.keys() == tensors.keys() and all(
        torch.equal(expected[name], tensors[name]) for name in expected
    )


def test_a_run_for_lsq(lsq_export, output, tmp_path):
    path = tmp_path / "model.safetensors"
    status, said = lsq_export(output, "lsq", path)
    assert status == 0 and said == f"{path}: {path.stat().st_size / 1e6:.1f} MB for lsq\n"
    source = run_files.find(output / "int8")
    found, exported = trained.load(source), model_file.read(path)
    assert same(found.model, exported.model.tensors)
    assert list(exported.source) == found.source.symbols
    assert list(exported.target) == found.target.symbols
    assert exported.subwords == source.subwords.read_bytes()
    assert exported.trained_length == 40


def test_weights_of_4_bits(lsq_export, output, tmp_path):
    whole, narrow, again = (tmp_path / name for name in ("whole", "narrow", "again"))
    assert lsq_export(output, "lsq", whole, "--bits", 8)[0] == 0
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
    for model, target, options, message in (
        (output, "fairseq", ("--bits", 4), "--bits 4 is for files that lsq reads, not for fairseq"),
        (narrow, "lsq", ("--bits", 8), "is exported for lsq already"),
    ):
        status, said = lsq_export(model, target, tmp_path / "other", *options)
        assert status == 2 and message in said and not (tmp_path / "other").exists()


def test_a_checkpoint_for_lsq(lsq_export, output, tmp_path):
    checkpoint, path = output / "int8" / CHECKPOINT, tmp_path / "model"
    status, said = lsq_export(checkpoint, "lsq", path)
    assert status == 2 and "if it is a checkpoint, give the folder of its dictionaries" in said
    assert lsq_export(checkpoint, "lsq", path, "--data", output / "data")[0] == 0
    exported = model_file.read(path)
    assert same(trained.load(run_files.find(output)).model, exported.model.tensors)
    assert exported.subwords is None


def test_for_fairseq(lsq_export, output, tmp_path):
    path = tmp_path / "model.pt"
    assert lsq_export(output, "fairseq", path)[0] == 0
    (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], {"data": str(output / "data")}
    )
    assert type(model) is TransformerModel
    assert (task.cfg.source_lang, task.cfg.target_lang) == ("src", "tgt")
    status, said = lsq_export(path, "lsq", tmp_path / "again", "--data", output / "data")
    assert status == 2 and "is of fairseq's own TransformerModel; give one of lsq's" in said


def test_for_ctranslate2_from_a_run_and_from_a_file(lsq_export, output, tmp_path):
    ctranslate2 = pytest.importorskip(
        "ctranslate2", reason="needs CTranslate2; pip install '.[ctranslate2]'"
    )
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
    status, said = lsq_export(output, "ctranslate2", tmp_path / "one")
    assert (
        status == 2 and "is there already; choose another, or replace it with --overwrite" in said
    )
    assert lsq_export(output, "ctranslate2", tmp_path / "one", "--overwrite")[0] == 0
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")
    assert lsq_export(tmp_path / "file", "ctranslate2", tmp_path / "x", "--data", tmp_path)[0] == 2


def test_a_language_model(lsq_export, corpus, tmp_path):  # noqa: F811
    with logging_to(tmp_path / "train.log"):
        train.run([str(corpus), "--save-dir", str(tmp_path), *LANGUAGE_MODEL])
    given = tmp_path / "checkpoint_last.pt", ["--data", corpus]
    assert [
        lsq_export(given[0], target, tmp_path / target, *given[1])[0]
        for target in ("lsq", "fairseq")
    ] == [0, 0]
    found = trained.load(run_files.find(given[0], corpus))
    exported = model_file.read(tmp_path / "lsq")
    assert same(found.model, exported.model.tensors) and exported.source is None
    assert list(exported.target) == found.target.symbols
    paths = [str(tmp_path / "fairseq")]
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(paths, {"data": str(corpus)})
    assert type(model) is TransformerLanguageModel and type(task) is LanguageModelingTask


@pytest.mark.parametrize("target", export.TARGETS)
def test_formats_by_patterns_are_refused_as_they_were_given(
    lsq_export, output, tmp_path, monkeypatch, target
):
    path, formats = tmp_path / "mixed.pt", "int8,*fc2*=nvfp4,encoder.*=float32"
    state = torch.load(output / "int8" / CHECKPOINT)
    state["cfg"]["model"].lsq_weight_format = formats
    torch.save(state, path)
    monkeypatch.setattr(trained, "load", None)  # nothing is loaded before
    status, said = lsq_export(path, target, tmp_path / "out", "--data", output / "data")
    assert (
        status == 2
        and f"weights in {formats}, activations in int8, gradients in int8; only models in int8"
        in said
    )
    assert files_in(tmp_path).keys() == {"mixed.pt"}


@pytest.mark.parametrize("target", export.TARGETS)
def test_outputs_that_are_refused(lsq_export, tmp_path, target):
    (tmp_path / "model.pt").write_bytes(b"PK")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"mine")
    (tmp_path / "text").write_text("export {mine}\n" * 9)
    before = files_in(tmp_path)
    for path, options, message in (
        ("none/out", (), "there is no folder .*none; make it first"),
        ("model.pt", (), "is there already; choose another"),
        ("model.pt", ("--overwrite",), "is what is exported, or part of it; choose another"),
        ("folder", ("--overwrite",), f"is there and was not exported for {target}; choose another"),
        ("text", ("--overwrite",), f"is there and was not exported for {target}; choose another"),
        (".", ("--overwrite",), "is what is exported, or part of it; choose another"),
    ):
        status, said = lsq_export(tmp_path / "model.pt", target, tmp_path / path, *options)
        assert status == 2
        with pytest.raises(ValueError, match=message):
            raise ValueError(said)
    assert files_in(tmp_path) == before


def test_what_was_exported_is_replaced_and_never_the_run(lsq_export, output, tmp_path):
    path, before = tmp_path / "made", files_in(output)
    for target, other in (("lsq", "fairseq"), ("fairseq", "lsq")):
        assert [
            lsq_export(output, target, path, *options)[0] for options in ((), ("--overwrite",))
        ] == [0, 0]
        assert lsq_export(output, other, path, "--overwrite")[0] == 2
        path.unlink()
        status, said = lsq_export(output, target, output / "int8" / CHECKPOINT, "--overwrite")
        assert status == 2 and "is what is exported, or part of it" in said
    assert files_in(output) == before


def test_one_export_at_a_time(lsq_export, output, tmp_path):
    path = tmp_path / "made"
    with locked_file(path, ""):
        status, said = lsq_export(output, "lsq", path)
    assert (
        status == 1 and f"is writing into {path}; wait for it, or choose another --output" in said
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", export.TARGETS)
def test_models_that_are_refused(lsq_export, output, tmp_path, target):
    made = tmp_path / "made"
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes((output / "int8" / CHECKPOINT).read_bytes()[:-100])
    exported = tmp_path / "exported"
    exported.write_bytes((30).to_bytes(8, "little") + b'{"x": ' + bytes(50))
    before = files_in(tmp_path)
    reason = (
        "is damaged or no model of `lsq export`"
        if target == "ctranslate2"
        else "exported for lsq already"
    )
    for model, options, message in (
        (tmp_path / "none", (), "is not there"),
        (tmp_path, (), "is no finished run of lsq train-text"),
        (output, ("--data", output / "data"), "leave --data and --sentencepiece-model out"),
        (damaged, ("--data", output / "data"), "damaged.pt is damaged"),
        (output / "int8" / CHECKPOINT, ("--data", tmp_path), "has no dictionaries"),
        (exported, (), reason),
    ):
        status, said = lsq_export(model, target, made, *options)
        assert status == 2 and message in said, said
    assert files_in(tmp_path) == before
