"""The plugin plans memory by itself; trainings are the same to the bit in every mode."""

import itertools
import logging
from types import SimpleNamespace

import pytest
import torch

from lsq.fairseq import memory
from lsq.fairseq.memory import bounding_batch
from lsq.layers.memory import plan_memory
from lsq.run.step import buffers_of
from tests.fairseq.comparison import assert_equal_states


@pytest.mark.thorough
@pytest.mark.parametrize("options", ["--lsq-backward int8 --update-freq 2", "--lsq-backward float"])
def test_trainings_are_the_same_in_every_mode(train, tmp_path, caplog, options):
    with caplog.at_level(logging.INFO, logger=memory.__name__):
        states = {
            mode: train(tmp_path / mode, f"--max-update 4 --lsq-memory {mode} {options}")["model"]
            for mode in ("planned", "guard", "naive")
        }
    said = [record.getMessage() for record in caplog.records if record.name == memory.__name__]
    planned, _, naive = said
    assert planned.startswith("memory (planned): ") and "above the lower bound" in planned
    assert "bounded by 1 sentences of 120 and 120 tokens" in planned
    assert "--lsq-memory naive" in naive
    for mode in ("guard", "naive"):
        assert_equal_states(states["planned"], states[mode])


def test_planned_is_the_default_but_for_models_without_layers_of_lsq(train, tmp_path, monkeypatch):
    modes = []
    monkeypatch.setattr("lsq.fairseq.task.plan_training", lambda *given: modes.append(given[-1]))
    theirs = "--arch transformer --criterion label_smoothed_cross_entropy"
    train(tmp_path / "theirs", f"--max-update 1 {theirs}")
    train(tmp_path / "ours", "--max-update 2")
    assert modes == ["planned"]


def test_a_task_trains_a_batch_outside_of_an_epoch(build, parse, batch):
    """There is no trainer to say which model is trained: nothing is planned."""
    task, model = build()
    sample, criterion = batch(task), task.build_criterion(parse())
    backward = SimpleNamespace(backward=lambda loss: loss.backward())
    loss, size, _ = task.train_step(sample, model, criterion, backward, 0)
    assert size > 0 and loss.isfinite()
    assert all(one.step_memory is None for one in model.modules() if hasattr(one, "step_memory"))


def test_another_criterion_trains_without_a_plan(train, tmp_path, caplog):
    train(tmp_path, "--max-update 2 --criterion label_smoothed_cross_entropy")
    (said,) = (record.getMessage() for record in caplog.records if record.name == memory.__name__)
    assert "not planned" in said and "--criterion lsq_label_smoothed" in said


def test_the_bounding_batch_lies_where_the_model_is(build, monkeypatch):
    task, model = build()
    batch, seen = task.bounding_batch(model), []

    class Criterion(memory.LSQLabelSmoothedCrossEntropyCriterion):
        def __init__(self):
            torch.nn.Module.__init__(self)

        def forward(self, model, sample):
            return [seen.append(sample)]

    monkeypatch.setattr(memory, "plan_memory", lambda model, step, mode: step())
    memory.plan_training(model.to("meta"), Criterion(), batch, "planned")
    inputs = seen[0]["net_input"]
    assert {tensor.device.type for tensor in (seen[0]["target"], *inputs.values())} == {"meta"}


@pytest.mark.parametrize(
    "tokens, sentences, positions, multiple, expected",
    [
        (100, None, (30, 30), 1, (4, 30, 30)),
        (90, None, (30, 45), 1, (3, 30, 45)),
        (20, None, (1024, 1024), 1, (1, 20, 20)),
        (100, 2, (30, 30), 1, (2, 30, 30)),
        (None, 7, (11, 13), 1, (7, 11, 13)),
        (100, None, (30, 30), 8, (25, 32, 32)),
    ],
)
def test_the_bounding_batch(build, tokens, sentences, positions, multiple, expected):
    words = build()[0].target_dictionary
    limits = {"max_tokens": tokens, "max_sentences": sentences, "max_positions": positions}
    batch = bounding_batch(words, **limits, length_multiple=multiple)
    source, target = batch["net_input"]["src_tokens"], batch["target"]
    assert (*source.shape, target.shape[1]) == expected and len(target) == expected[0]
    assert batch["net_input"]["prev_output_tokens"].shape == target.shape
    assert batch["nsentences"] == expected[0] and batch["ntokens"] == target.numel()
    assert (source != words.pad()).all()
    with pytest.raises(ValueError, match="--max-tokens or --batch-size"):
        bounding_batch(words, **limits | {"max_tokens": None, "max_sentences": None})


@pytest.mark.parametrize("multiple", [1, 8])
def test_no_batch_that_fairseq_may_make_is_larger_than_planned(build, parse, multiple):
    """Every combination of lengths, with as many sentences as --max-tokens lets in."""
    task, model = build("--lsq-backward int8 --encoder-layers 1 --decoder-layers 1")
    criterion = task.build_criterion(parse())

    def step_of(batch):
        plan = plan_memory(model, lambda: criterion(model, batch)[0]).step
        return buffers_of(plan.passes, [str(node) for node in range(len(plan.offsets))])

    words = task.target_dictionary
    limits = {"max_sentences": None, "max_positions": (16, 11), "length_multiple": multiple}
    bound = step_of(bounding_batch(words, max_tokens=50, **limits))
    for lengths in itertools.product((1, 5, 15, 16), (1, 4, 11)):
        limits |= {"max_sentences": 50 // max(lengths), "max_positions": lengths}
        found = step_of(bounding_batch(words, max_tokens=None, **limits))
        assert found.keys() == bound.keys()
        assert all(found[key].size <= bound[key].size for key in bound), lengths


def test_a_batch_beyond_the_plan_names_both_sizes(train, tmp_path, monkeypatch):
    """As a task that makes its own batches might bring it."""
    original = bounding_batch
    monkeypatch.setattr(
        "lsq.fairseq.task.bounding_batch",
        lambda dictionary, **limits: original(dictionary, **{**limits, "max_tokens": 20}),
    )
    with pytest.raises(
        ValueError, match=r"too large for the planned memory.*planned were.*--max-tokens"
    ):
        train(tmp_path, "--max-update 2")
