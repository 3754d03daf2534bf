"""The plugin plans memory by itself; trainings are the same to the bit in every mode."""

import itertools
import logging

import pytest
import torch

from lsq.fairseq import memory
from lsq.fairseq.memory import bounding_batch
from lsq.layers.memory import plan_memory
from lsq.run.step import buffers_of


@pytest.mark.thorough
@pytest.mark.parametrize("options", ["--lsq-backward int8 --update-freq 2", "--lsq-backward float"])
def test_trainings_are_the_same_in_every_mode(train, tmp_path, caplog, options):
    with caplog.at_level(logging.INFO, logger=memory.__name__):
        states = {
            mode: train(tmp_path / mode, f"--max-update 4 --lsq-memory {mode} {options}")["model"]
            for mode in ("planned", "guard", "naive")
        }
    said = [record.getMessage() for record in caplog.records if record.name == memory.__name__]
    assert (
        len(said) == 3
        and said[0].startswith("memory (planned): ")
        and "above the lower bound" in said[0]
    )
    assert (
        "bounded by 1 sentences of 120 and 120 tokens" in said[0]
        and "--lsq-memory naive" in said[2]
    )
    for mode in ("guard", "naive"):
        assert all(
            torch.equal(states["planned"][name], states[mode][name]) for name in states["planned"]
        )


def test_planned_is_the_default(train, tmp_path, monkeypatch):
    modes = []
    monkeypatch.setattr(
        "lsq.fairseq.task.plan_training", lambda *arguments: modes.append(arguments[-1])
    )
    train(tmp_path, "--max-update 2")
    assert modes == ["planned"]


def test_a_model_without_layers_of_lsq_is_left_alone(train, tmp_path, monkeypatch):
    monkeypatch.setattr("lsq.fairseq.task.plan_training", lambda *arguments: pytest.fail("planned"))
    train(tmp_path, "--max-update 1 --arch transformer --criterion label_smoothed_cross_entropy")


def test_another_criterion_trains_without_a_plan(train, tmp_path, caplog):
    train(tmp_path, "--max-update 2 --criterion label_smoothed_cross_entropy")
    said = [record.getMessage() for record in caplog.records if record.name == memory.__name__]
    assert (
        len(said) == 1 and "not planned" in said[0] and "--criterion lsq_label_smoothed" in said[0]
    )


@pytest.mark.thorough
def test_lengths_that_are_padded_to_a_multiple(train, tmp_path):
    train(
        tmp_path,
        "--max-update 4 --required-seq-len-multiple 8 --max-source-positions 16"
        " --max-target-positions 16",
    )


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


def test_an_unknown_mode(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--lsq-memory red")
    assert "lsq-memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "limits, expected",
    [
        ({"max_tokens": 100, "max_sentences": None, "max_positions": (30, 30)}, (4, 30, 30)),
        ({"max_tokens": 90, "max_sentences": None, "max_positions": (30, 45)}, (3, 30, 45)),
        ({"max_tokens": 20, "max_sentences": None, "max_positions": (1024, 1024)}, (1, 20, 20)),
        ({"max_tokens": 100, "max_sentences": 2, "max_positions": (30, 30)}, (2, 30, 30)),
        ({"max_tokens": None, "max_sentences": 7, "max_positions": (11, 13)}, (7, 11, 13)),
        (
            {
                "max_tokens": 100,
                "max_sentences": None,
                "max_positions": (30, 30),
                "length_multiple": 8,
            },
            (25, 32, 32),
        ),
    ],
)
def test_the_bounding_batch(build, limits, expected):
    task, _ = build()
    batch = bounding_batch(task.target_dictionary, **limits)
    source = batch["net_input"]["src_tokens"]
    assert (*source.shape, batch["target"].shape[1]) == expected
    assert (
        batch["net_input"]["prev_output_tokens"].shape
        == batch["target"].shape
        == (expected[0], expected[2])
    )
    assert batch["nsentences"] == expected[0] and batch["ntokens"] == batch["target"].numel()
    assert (source != task.target_dictionary.pad()).all()


def test_without_any_limit(build):
    with pytest.raises(ValueError, match="--max-tokens or --batch-size"):
        bounding_batch(
            build()[0].target_dictionary, max_tokens=None, max_sentences=None, max_positions=(9, 9)
        )


@pytest.mark.parametrize("multiple", [1, 8])
def test_no_batch_that_fairseq_may_make_is_larger_than_planned(build, parse, multiple):
    """Every combination of lengths, with as many sentences as --max-tokens lets in."""
    task, model = build("--lsq-backward int8 --encoder-layers 1 --decoder-layers 1")
    criterion = task.build_criterion(parse())

    def step_of(batch):
        plan = plan_memory(model, lambda: criterion(model, batch)[0]).step
        return buffers_of(plan.passes, [str(node) for node in range(len(plan.offsets))])

    longest = (16, 11)
    bound = step_of(
        bounding_batch(
            task.target_dictionary,
            max_tokens=50,
            max_sentences=None,
            max_positions=longest,
            length_multiple=multiple,
        )
    )
    for source, target in itertools.product((1, 5, 15, 16), (1, 4, 11)):
        found = step_of(
            bounding_batch(
                task.target_dictionary,
                max_tokens=None,
                max_sentences=50 // max(source, target),
                max_positions=(source, target),
                length_multiple=multiple,
            )
        )
        assert found.keys() == bound.keys()
        assert all(found[key].size <= bound[key].size for key in bound), (source, target)


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
