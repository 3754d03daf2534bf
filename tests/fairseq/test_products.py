"""A training's products follow from its options, and are those that it runs."""

import shutil

import pytest
import torch

from lsq.fairseq import products
from lsq.fairseq.memory import build_training
from lsq.fairseq.products import (
    generation_programs,
    generation_rows,
    products_of_training,
    token_counts,
    training_programs,
)
from tests.gemm.operands import asked
from tests.program.test_products import prepared_for_cuda, run_on_the_cpu

VOCABULARY = 75
PADDED = 80


def keys_of(parse, options="", **changes):
    given = {"backward": ["int8"], "tokens": [96], "rows": [10], "kind": "cpu"} | changes
    return products_of_training(parse("--share-all-embeddings " + options), VOCABULARY, **given)


def test_products_of_a_training(parse):
    keys = keys_of(parse)
    weights = {"qkv": (96, 32), "out": (32, 32), "fc1": (48, 32), "key value": (64, 32)}
    for n, k in weights.values():
        assert asked("linear_int8", 96, n, k) in keys
        assert asked("linear_input_gradient", 96, k, n) in keys
        assert asked("linear_weight_gradient", n, k, 96) in keys
        assert asked("linear_int8", 10, n, k) in keys
    assert asked("linear_int32", 96, 32, 48) in keys
    assert asked("vocabulary_cross_entropy", 96, PADDED, 32) in keys
    assert asked("linear_int32", 10, PADDED, 32) in keys
    assert len(keys) == len(set(keys)) == 6 + 2 * 6 + 6


def test_batches_and_modes_add_up(parse):
    few = keys_of(parse, backward=["float"])
    assert {key.op for key in few} == {"linear_int8", "linear_int32", "vocabulary_cross_entropy"}
    assert set(few) < set(keys_of(parse))
    both = keys_of(parse, backward=["float", "int8"], tokens=[96, 64], rows=[10, 5])
    assert set(both) == {
        key for tokens in (96, 64) for rows in (10, 5) for key in keys_of(parse, tokens=[tokens], rows=[rows])
    }
    assert both.index(asked("linear_int8", 96, 32, 32)) < both.index(asked("linear_int8", 64, 32, 32))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("backward", ["float", "int8"])
@pytest.mark.parametrize("more", ["", "--lsq-mode float", "--lsq-backward-dtype bfloat16"])
def test_on_cuda_they_are_what_the_prepared_programs_launch(parse, backward, more):
    options = f"--lsq-activation-init fixed --lsq-weight-init fixed --lsq-backward {backward} {more}"
    given = parse(f"--share-all-embeddings {options}")
    _, model, criterion = build_training(given, VOCABULARY)
    programs = [*training_programs(model, criterion, 96), *generation_programs(model, 10)]
    launched = prepared_for_cuda(dict.fromkeys(programs))
    keys = keys_of(parse, more, backward=[backward], kind="cuda")
    assert len(keys) == len(set(keys))
    assert set(keys) == {key for key in launched if key.batch == 1}
    assert {key.batch for key in launched} > {1}  # of attention


@pytest.mark.parametrize("backward", ["float", "int8"])
@pytest.mark.parametrize("more", ["", "--encoder-normalize-before --decoder-normalize-before --lsq-clip-gradient lsq"])
def test_they_are_what_a_step_runs(build, parse, backward, more):
    task, model = build(f"--lsq-backward {backward} --lsq-activation-init fixed {more}")
    criterion = task.build_criterion(parse(""))
    tokens = 12
    words = torch.randint(4, 10, (tokens, 1))
    batch = {
        "ntokens": tokens,
        "nsentences": tokens,
        "net_input": {
            "src_tokens": words, "src_lengths": torch.ones(tokens, dtype=torch.int64), "prev_output_tokens": words,
        },
        "target": words,
    }
    expected = products._products(training_programs(model, criterion, tokens), "cpu")
    assert set(expected) == run_on_the_cpu(lambda: criterion(model.train(), batch)[0].backward())


def test_they_are_what_a_step_of_generation_runs(build):
    _, model = build("--lsq-activation-init fixed")
    expected = products._products(generation_programs(model, 5), "cpu")
    words = torch.randint(4, 10, (5, 1))

    @torch.no_grad()
    def step():
        memory = model.eval().encoder(words, torch.ones(5, dtype=torch.int64))
        model.decoder(words, memory, incremental_state={})

    assert set(expected) == run_on_the_cpu(step)


def test_other_architectures_are_refused(parse):
    with pytest.raises(ValueError, match="arch is 'transformer'; allowed: lsq_transformer"):
        keys_of(parse, "--arch transformer")


def test_token_counts():
    assert token_counts(4096, 1024) == [4096, 3072, 2048, 1024]
    assert token_counts(100, 32) == [100, 96, 64, 32]
    assert token_counts(20, 32) == [20]
    with pytest.raises(ValueError, match="step is 100; .*multiple"):
        token_counts(4096, 100)


def test_generation_rows():
    assert generation_rows(5, 12) == [60, 40, 20, 10, 5]
    assert generation_rows(4, 400)[:3] == [1600, 512, 256]
    assert generation_rows(1, 1) == [1]
