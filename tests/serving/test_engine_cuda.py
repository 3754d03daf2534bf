"""Engine on CUDA: the candidates and hypotheses of the CPU; in the emulator, or on a GPU."""

import functools

import pytest
import torch
from torch.testing import assert_close

from lsq.models.sparsity import choose
from lsq.quant.stored import Fields
from lsq.run.cuda import CUDA
from lsq.serving import SearchOptions, search
from lsq.serving.decoding_model import DecodingModel, model_of
from lsq.serving.engine import Engine
from tests.ops import cuda
from tests.serving.models import MIX, batch, small_model
from tests.serving.test_engine import TIME, hypotheses, sentences

SMALL = {"heads": 2, "encoder_layers": 1}
"""Heads of 24 columns; kernels want a multiple of 8."""


@functools.cache
def usual_model() -> DecodingModel:
    return model_of(small_model(**SMALL))


def engines(activations=torch.float32, sparse=False, **options) -> tuple[Engine, Engine]:
    """On the CPU and on CUDA; `sparse`: the weights of layers are 2:4 sparse."""
    model = model_of(small_model(**SMALL | options)) if options or sparse else usual_model()
    for name, codes in model.tensors.items():
        if sparse and ".layers." in name and name.endswith(".codes"):
            codes *= choose(codes.int().abs())
    return Engine(model), Engine(model, CUDA(cuda.current_device(), activations=activations))


@pytest.mark.parametrize(
    "options",
    [
        {"quant": {"weight_format": MIX}},
        *(
            pytest.param(one, marks=pytest.mark.thorough)
            for one in (
                {"sparse": True},
                {"quant": {"bits": 2, "clips": "absmax"}, "encoder_layers": 0},
                {},
                {"encoder_layers": 0, "tied": False, "pre_norm": True, "activation": "gelu"},
                {"quant": {"weight_format": "int4"}, "pre_norm": True, "norm": "rms"},
                {"quant": {"bits": 3}, "pre_norm": True, "norm": "rms"},
                {"embedding": {"positions": "learned", "layer_norm": True}},
            )
        ),
    ],
)
def test_candidates_are_those_of_the_cpu(options):
    """Rows fork, change places and die; the fourth step asks for all words."""
    both = engines(**options)
    source, chance = sentences(batch()), torch.Generator().manual_seed(5)
    for one in both:
        one.begin(source, rows=6, steps=5)
    words, parents = torch.full((3,), 2), torch.arange(3)
    for rows in (6, 5, 3, 7):
        asked = torch.randint(0, 37, (len(words), 2), generator=chance)
        first, second = (one.step(words, parents, top=5, wanted=asked) for one in both)
        assert torch.equal(second.words, first.words)
        assert_close(second.log_probabilities, first.log_probabilities, rtol=0, atol=1e-4)
        assert_close(second.wanted, first.wanted, rtol=0, atol=1e-4)
        parents = torch.randint(0, len(words), (min(rows, 6),), generator=chance)
        words = first.words[parents, torch.randint(0, 5, parents.shape, generator=chance)]
    assert_close(*(one.step_all(words, parents) for one in reversed(both)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 4, 5])
def test_codes_of_few_bits_are_packed_to_fields(bits):
    engine = engines(encoder_layers=0, quant={"bits": bits})[1]
    name, inner = "decoder.layers.0.self_attn.qkv_weight", 48
    weight, codes = engine._preparation.weight(name, inner), engine.model.codes(name, inner)
    assert isinstance(weight.format, Fields) == (bits <= 4)
    assert weight.codes.numel() == (len(codes) * 64 * bits // 8 if bits <= 4 else codes.numel())
    assert torch.equal(weight.format.unpack(weight.codes.cpu(), inner), codes)
    (projection,) = engine._projection.values()
    assert projection.codes.shape[1] == inner and projection.format.bits == bits


def test_each_weight_of_a_mix_is_packed_by_itself():
    engine = engines(quant={"weight_format": MIX})[1]
    for name, inner, packed in (
        ("decoder.layers.1.feed_forward.fc2_weight", 96, False),
        ("decoder.layers.1.feed_forward.fc1_weight", 48, False),
        ("encoder.layers.0.self_attn.qkv_weight", 48, True),
    ):
        weight, codes = engine._preparation.weight(name, inner), engine.model.codes(name, inner)
        assert isinstance(weight.format, Fields) == packed, name
        assert torch.equal(weight.format.unpack(weight.codes.cpu(), inner), codes)


def thoroughly(**options):
    return pytest.param(SearchOptions(**options), marks=pytest.mark.thorough)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        SearchOptions(beam=3, max_len_b=3),
        thoroughly(beam=2, max_len_b=6, sampling=True, sampling_topk=4, nbest=2),
        thoroughly(beam=4, max_len_b=7, no_repeat_ngram_size=2, unk_penalty=0.5, nbest=4),
        thoroughly(beam=3, max_len_b=9),
    ],
)
def test_a_search_finds_what_it_finds_on_the_cpu(options):
    source = sentences(batch(lengths=(7, 3, 11, 1)))
    prefixes = [None, torch.tensor([5, 6]), None, torch.tensor([11])]
    here, there = (search(one, source, options, prefixes) for one in engines())
    for first, second in zip(here, there, strict=True):
        assert [one.words.tolist() for one in second] == [one.words.tolist() for one in first]
        for one, other in zip(first, second, strict=True):
            assert_close(other.word_scores, one.word_scores, rtol=0, atol=1e-4)


@pytest.mark.thorough
def test_batches_of_other_sizes():
    """What was prepared is used again, or anew where caches have grown."""
    both, target = engines(), hypotheses(17)
    for lengths, rows in (((4, 5), 2), ((9, 2, 5), 17), ((4, 5), 2)):
        found = []
        for one in both:
            one.begin(sentences(batch(lengths=lengths)), rows=rows, steps=2)
            one.step(target[:rows, 0], torch.arange(rows) % len(lengths), top=1)
            found.append(one.step(target[:rows, 1], torch.arange(rows).flip(0), top=3))
        assert torch.equal(found[0].words, found[1].words)


@pytest.mark.thorough
def test_activations_in_half_precision():
    here, there = engines(torch.bfloat16)
    target, found = hypotheses(3), []
    for one in (here, there):
        one.begin(sentences(batch()), rows=3, steps=TIME)
        found.append(torch.stack([one.step_all(target[:, t], torch.arange(3)) for t in range(3)]))
    signal = found[0] - found[0].mean()
    assert (found[1] - found[0]).square().mean() < signal.square().mean() / 100


def test_models_that_kernels_cannot_take_are_refused():
    engine = engines(heads=4)[1]
    with pytest.raises(ValueError, match="heads of 12 columns cannot run on CUDA"):
        engine.begin(sentences(batch()), rows=3, steps=2)
