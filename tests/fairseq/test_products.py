"""A training's products follow from its options, and are those that it runs."""

import pytest
import torch

from lsq.fairseq import products
from lsq.fairseq.products import generation_programs, products_of_training, training_programs
from lsq.gemm.product_key import ProductKey
from tests.program.test_products import Products

VOCABULARY = 75
PADDED = 80


def keys_of(parse, options="", **changes):
    given = {"backward": ["int8"], "tokens": [96], "rows": [10], "kind": "cpu"} | changes
    return products_of_training(parse("--share-all-embeddings " + options), VOCABULARY, **given)


def test_products_of_a_training(parse):
    keys = keys_of(parse)
    weights = {"qkv": (96, 32), "out": (32, 32), "fc1": (48, 32), "key value": (64, 32)}
    for n, k in weights.values():
        assert ProductKey.of("linear_int8", 96, n, k) in keys
        assert ProductKey.of("linear_input_gradient", 96, k, n) in keys
        assert ProductKey.of("linear_weight_gradient", n, k, 96) in keys
        assert ProductKey.of("linear_int8", 10, n, k) in keys
    assert ProductKey.of("linear_int32", 96, 32, 48) in keys
    assert ProductKey.of("vocabulary_cross_entropy", 96, PADDED, 32) in keys
    assert ProductKey.of("linear_int32", 10, PADDED, 32) in keys
    assert len(keys) == len(set(keys)) == 6 + 2 * 6 + 6


def test_batches_and_modes_add_up(parse):
    few = keys_of(parse, backward=["float"])
    assert {key.op for key in few} == {"linear_int8", "linear_int32", "vocabulary_cross_entropy"}
    assert set(few) < set(keys_of(parse))
    both = keys_of(parse, backward=["float", "int8"], tokens=[96, 64], rows=[10, 5])
    assert set(both) == {
        key for tokens in (96, 64) for rows in (10, 5) for key in keys_of(parse, tokens=[tokens], rows=[rows])
    }
    assert both.index(ProductKey.of("linear_int8", 96, 32, 32)) < both.index(ProductKey.of("linear_int8", 64, 32, 32))
    on_gpu = keys_of(parse, backward=["float", "int8"], kind="cuda")
    assert {key.dtype for key in on_gpu} == {"int8", "bfloat16"}


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
    with Products() as seen:
        criterion(model.train(), batch)[0].backward()
    assert {(key.m, key.n, key.k) for key in expected} == {shape[1:] for shape in seen.found if shape[0]}


def test_they_are_what_a_step_of_generation_runs(build):
    _, model = build("--lsq-activation-init fixed")
    expected = products._products(generation_programs(model, 5), "cpu")
    words = torch.randint(4, 10, (5, 1))
    with Products() as seen, torch.no_grad():
        memory = model.eval().encoder(words, torch.ones(5, dtype=torch.int64))
        model.decoder(words, memory, incremental_state={})
    assert {(key.m, key.n, key.k) for key in expected} == {shape[1:] for shape in seen.found if shape[0]}


def test_other_architectures_are_refused(parse):
    with pytest.raises(ValueError, match="arch is 'transformer'; allowed: lsq_transformer"):
        keys_of(parse, "--arch transformer")
