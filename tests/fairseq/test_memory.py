"""The plugin plans memory by itself; trainings are the same to the bit in every mode."""

import itertools
import logging

import pytest
import torch

from lsq.fairseq import memory
from lsq.fairseq.memory import largest_batch
from lsq.layers.memory import plan_memory
from lsq.program.step import buffers_of


@pytest.mark.parametrize("options", ["--lsq-backward int8 --update-freq 2", "--lsq-backward float"])
def test_trainings_are_the_same_in_every_mode(train, tmp_path, caplog, options):
    with caplog.at_level(logging.INFO, logger=memory.__name__):
        states = {
            mode: train(tmp_path / mode, f"--max-update 4 --lsq-memory {mode} {options}")["model"]
            for mode in ("planned", "guard", "naive")
        }
    said = [record.getMessage() for record in caplog.records if record.name == memory.__name__]
    assert len(said) == 2 and said[0].startswith("memory (planned): ") and "above the lower bound" in said[0]
    assert "sentences of 120 and 120 tokens" in said[0]
    for mode in ("guard", "naive"):
        assert all(torch.equal(states["planned"][name], states[mode][name]) for name in states["planned"])


def test_planned_is_the_default(train, tmp_path, monkeypatch):
    modes = []
    monkeypatch.setattr("lsq.fairseq.task.plan_training", lambda *arguments: modes.append(arguments[-1]))
    train(tmp_path, "--max-update 2")
    assert modes == ["planned"]


def test_a_model_without_layers_of_lsq_is_left_alone(train, tmp_path, monkeypatch):
    monkeypatch.setattr("lsq.fairseq.task.plan_training", lambda *arguments: pytest.fail("planned"))
    train(tmp_path, "--max-update 1 --arch transformer --criterion label_smoothed_cross_entropy")


def test_an_unknown_mode(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--lsq-memory red")
    assert "lsq-memory" in capsys.readouterr().err


@pytest.mark.parametrize("limits, expected", [
    ({"max_tokens": 100, "max_sentences": None, "max_positions": (30, 30)}, (4, 30, 30)),
    ({"max_tokens": 90, "max_sentences": None, "max_positions": (30, 45)}, (3, 30, 45)),
    ({"max_tokens": 20, "max_sentences": None, "max_positions": (1024, 1024)}, (1, 20, 20)),
    ({"max_tokens": 100, "max_sentences": 2, "max_positions": (30, 30)}, (2, 30, 30)),
    ({"max_tokens": None, "max_sentences": 7, "max_positions": (11, 13)}, (7, 11, 13)),
    ({"max_tokens": 100, "max_sentences": None, "max_positions": (30, 30), "length_multiple": 8}, (4, 32, 32)),
])
def test_the_largest_batch(build, limits, expected):
    task, _ = build()
    batch = largest_batch(task.target_dictionary, **limits)
    source = batch["net_input"]["src_tokens"]
    assert (*source.shape, batch["target"].shape[1]) == expected
    assert batch["net_input"]["prev_output_tokens"].shape == batch["target"].shape == (expected[0], expected[2])
    assert batch["nsentences"] == expected[0] and batch["ntokens"] == batch["target"].numel()
    assert (source != task.target_dictionary.pad()).all()


def test_without_any_limit(build):
    with pytest.raises(ValueError, match="--max-tokens or --batch-size"):
        largest_batch(build()[0].target_dictionary, max_tokens=None, max_sentences=None, max_positions=(9, 9))


def test_no_batch_that_fairseq_may_make_is_larger_than_planned(build, parse):
    """Every combination of lengths, with as many sentences as --max-tokens lets in."""
    task, model = build("--lsq-backward int8 --encoder-layers 1 --decoder-layers 1")
    criterion = task.build_criterion(parse())
    limits = {"max_tokens": 50, "max_sentences": None}

    def step_of(batch):
        plan = plan_memory(model, lambda: criterion(model, batch)[0]).step
        return buffers_of(plan.passes, [str(node) for node in range(len(plan.places))])

    longest = 16
    bound = step_of(largest_batch(task.target_dictionary, **limits, max_positions=(longest, longest)))
    for source, target in itertools.product((1, 5, 15, 16), repeat=2):
        sentences = 50 // max(source, target)
        found = step_of(
            largest_batch(
                task.target_dictionary, max_tokens=None, max_sentences=sentences, max_positions=(source, target)
            )
        )
        assert found.keys() == bound.keys()
        assert all(found[key].size <= bound[key].size for key in bound), (sentences, source, target)


def test_a_batch_beyond_the_plan_names_both_sizes(train, tmp_path, monkeypatch):
    """As a task that makes its own batches might bring it."""
    original = largest_batch
    monkeypatch.setattr(
        "lsq.fairseq.task.largest_batch",
        lambda dictionary, **limits: original(dictionary, **{**limits, "max_tokens": 20}),
    )
    with pytest.raises(ValueError, match=r"too large for the planned memory.*planned were.*--max-tokens"):
        train(tmp_path, "--max-update 2")
