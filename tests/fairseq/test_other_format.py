"""Checkpoints of fairseq in another number format: converted, or refused where they are loaded."""

import copy

import pytest
import torch

from lsq.commands import cli
from lsq.fairseq.other_format import converted
from lsq.observe import quantized_tensors
from tests.fairseq.comparison import assert_equal_states
from tests.sampling import first

LAST = "checkpoint_last.pt"
CLIPS = "weight_clip"
KEPT = "the optimizer's state is kept"


@pytest.fixture
def trained(train, tmp_path):
    """The folder of a short training in int8, and its last checkpoint."""
    return tmp_path / "int8", train(
        tmp_path / "int8", "--max-update 2 --share-all-embeddings --lsq-clips learned"
    )


def without_formats(state: dict) -> dict:
    """As earlier versions wrote it."""
    older = copy.copy(state)
    older["model"] = {
        name: one
        for name, one in state["model"].items()
        if not name.endswith((".format", ".float_fallback"))
    }
    return older


def test_a_checkpoint_in_another_format_goes_on(train, trained, tmp_path):
    folder, before = trained
    found = converted(folder / LAST, {"weight_format": "int4"})
    after = found.state
    said = "clips of 23 weights are measured anew, those of activations are kept"
    assert str(found.measured) == said and found.optimizer == KEPT
    for name, one in before["model"].items():
        assert torch.equal(after["model"][name], one) or name.endswith((CLIPS, ".format"))
    options = after["cfg"]["model"]
    assert options.lsq_weight_format == "int4" and options.lsq_bits == 8
    moments = after["last_optimizer_state"]["state"]
    assert {not one["exp_avg"].any() for one in moments.values()} == {True, False}
    assert all(one["step"] == 2 for one in moments.values())
    (tmp_path / "int4").mkdir()
    torch.save(after, tmp_path / "int4" / LAST)
    resumed = train(tmp_path / "int4", "--max-update 4 --share-all-embeddings")
    assert resumed["cfg"]["model"].lsq_weight_format == "int4"
    assert resumed["optimizer_history"][-1]["num_updates"] == 4


def test_formats_that_change_activations_or_shapes(trained):
    folder, before = trained
    found = converted(folder / LAST, {"bits": 4})
    assert found.measured.activations_due and found.optimizer == KEPT
    assert not any(one for name, one in found.state["model"].items() if name.endswith("calibrated"))
    found = converted(folder / LAST, {"weight_granularity": "tensor"})
    said = "_weight_clip has another shape): a training goes on with --reset-optimizer"
    assert said in found.optimizer
    assert found.state["last_optimizer_state"] is None
    clips = [one for name, one in found.state["model"].items() if name.endswith(CLIPS)]
    assert all(one.shape == (1,) for one in clips)


def test_patterns_and_formats_without_clips(train, trained, tmp_path):
    folder, before = trained
    found = converted(
        folder / LAST, {"weight_format": "int8,*fc2*=nvfp4,encoder.layers.0.*=float32"}
    )
    assert len(found.measured.weights) == 19 and "it is of " in found.optimizer
    first_layer = [name for name in found.state["model"] if name.startswith("encoder.layers.0.")]
    assert not any(name.endswith(CLIPS) for name in first_layer)
    torch.save(found.state, tmp_path / LAST)
    back = converted(tmp_path / LAST, {"weight_format": "int8"})
    assert len(back.measured.weights) == 23 and back.optimizer == "it holds no optimizer's state"
    assert back.state["model"].keys() == before["model"].keys()
    (tmp_path / "on").mkdir()
    resumed = train(
        tmp_path / "on", f"--restore-file {tmp_path / LAST} --share-all-embeddings --max-update 2"
    )
    assert resumed["cfg"]["model"].lsq_weight_format.endswith("float32")


def test_clips_that_were_fixed_are_measured_once_that_is_said(train, tmp_path):
    folder = tmp_path / "fixed"
    before = train(folder, "--max-update 1 --lsq-clip-init fixed")["model"]
    with pytest.raises(
        ValueError, match="is 'fixed', under which nothing is measured: add --clip-init mse"
    ):
        converted(folder / LAST, {"weight_format": "nvfp4"})
    found = converted(folder / LAST, {"weight_format": "nvfp4", "clip_init": "mse"}).state
    assert found["cfg"]["model"].lsq_clip_init == "mse"
    clips = [name for name in before if name.endswith(CLIPS)]
    assert all(
        (before[name] - 1).abs().max() < 0.1 and (found["model"][name] < 0.9).all()
        for name in clips
    )


def test_of_a_language_model(train, corpus, tmp_path):
    arguments = f"""
        --arch lsq_transformer_lm --task lsq_language_modeling --decoder-embed-dim 16
        --decoder-ffn-embed-dim 32 --decoder-attention-heads 2 --decoder-layers 1 --cpu
        --tokens-per-sample 16 --sample-break-mode eos --max-tokens 120 --max-update 2
        --num-workers 0 --optimizer adam --lr 0.001 --no-epoch-checkpoints --save-dir {tmp_path}
    """
    assert cli.main(["train", str(corpus), *arguments.split()]) == 0
    found = converted(tmp_path / LAST, {"weight_format": "int4"})
    assert len(found.measured.weights) == 5
    assert found.state["cfg"]["model"].lsq_weight_format == "int4"


def test_what_is_not_converted(train, trained, tmp_path):
    folder, _ = trained
    with pytest.raises(ValueError, match="has weight_format='int8' already; nothing is written"):
        converted(folder / LAST, {"weight_format": "int8"})
    train(tmp_path / "float", "--lsq-mode float --max-update 1")
    with pytest.raises(ValueError, match="is of a float model, which has no clips; .*--lsq-from"):
        converted(tmp_path / "float" / LAST, {"bits": 4})
    theirs = "--arch transformer --task translation --criterion label_smoothed_cross_entropy"
    train(tmp_path / "theirs", f"{theirs} --max-update 1")
    with pytest.raises(ValueError, match="is of transformer, and not of lsq"):
        converted(tmp_path / "theirs" / LAST, {"bits": 4})
    with pytest.raises(FileNotFoundError):
        converted(tmp_path / "none.pt", {"bits": 4})


@pytest.mark.parametrize("older", first([False, True], 1))
def test_another_format_is_refused_where_it_is_loaded(train, trained, tmp_path, older):
    folder, state = trained
    path = tmp_path / "given.pt"
    torch.save(without_formats(state) if older else state, path)
    for how in ("--restore-file", "--finetune-from-model"):
        with pytest.raises(Exception) as caught:
            train(
                tmp_path / how,
                f"{how} {path} --lsq-weight-format int4 --share-all-embeddings --max-update 4",
            )
        errors = f"{caught.value} {caught.value.__context__}"
        said = "was trained with weight_format='int8', but this model has weight_format='int4'"
        assert said in errors and "--output OTHER --weight-format int4" in errors
    resumed = train(tmp_path / "on", f"--restore-file {path} --share-all-embeddings --max-update 3")
    assert resumed["model"]["encoder.layers.0.format"].equal(
        state["model"]["encoder.layers.0.format"]
    )


def test_an_older_checkpoint_is_converted_as_its_options_say(trained, build, tmp_path):
    folder, state = trained
    torch.save(without_formats(state), tmp_path / LAST)
    now, then = (converted(one / LAST, {"bits": 4}).state["model"] for one in (folder, tmp_path))
    assert_equal_states(now, then)
    _, model = build("--lsq-bits 4 --share-all-embeddings")
    model.load_state_dict(now)
    assert all(clip.isfinite().all() for _, clip in quantized_tensors(model))
