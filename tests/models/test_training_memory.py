import pytest
import torch
from torch import nn

import lsq
from lsq.models.training_memory import KINDS, WAYS, Way, training_memory

transformers = pytest.importorskip("transformers")

BATCH = 3, 40


def llama(device: str, layers: int = 2, **options) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=96,
        intermediate_size=208,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=144,
        use_cache=False,
        **options,
    )
    with torch.device(device):
        return transformers.LlamaForCausalLM(config)


def step(model: nn.Module) -> torch.Tensor:
    words = torch.zeros(BATCH, dtype=torch.int64, device=model.device)
    return model(input_ids=words, labels=words).loss


def counted(way: Way, **options):
    return training_memory(lambda: llama("meta", **options), step, way)


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("remainder", (False, True))
def test_what_lasts_is_what_a_real_model_has(remainder, tied):
    found = counted(Way(remainder=remainder, again=False), tie_word_embeddings=tied)
    model = llama("cpu", tie_word_embeddings=tied).train()
    lsq.convert(model)
    lsq.train_codes(model, remainder=remainder)
    step(model).backward()
    optimizer = lsq.optim.Adam(model.parameters(), moment_bits=8)
    optimizer.step()
    kinds = found.timeline[0]
    assert found.parameters == sum(one.numel() for one in model.parameters())
    weights = [one for one in model.parameters() if hasattr(one, "codes")]
    codes = {id(one.codes): one.codes for one in weights}.values()
    sizes = [sum(one.nbytes for one in (each.stored, each.scale)) for each in codes]
    assert kinds["codes"] == sum(sizes)
    assert kinds.get("remainders", 0) == sum(one.stored.nbytes for one in codes) * remainder
    moments = [
        value.nbytes
        for weight in weights
        for value in optimizer.state[weight].values()
        if isinstance(value, torch.Tensor)
    ]
    assert kinds["moments"] == sum(moments)


@pytest.mark.thorough
def test_ways_from_most_to_least():
    peaks = {way: counted(way, layers=6).peak for way in WAYS}
    for way in WAYS:
        fewer = Way(remainder=False, again=way.again, offload=way.offload)
        assert peaks[fewer] <= peaks[way]
        if way.again and not way.offload:
            assert peaks[way] < peaks[Way(remainder=way.remainder, again=False)]
        if way.offload:
            assert peaks[way] < peaks[Way(remainder=way.remainder, again=True)]


@pytest.mark.thorough
def test_layers_that_are_computed_again_keep_a_byte_a_value():
    found = counted(Way(remainder=True, again=True), layers=5)
    most = max(one.get("layer inputs", 0) for one in found.timeline)
    values = BATCH[0] * BATCH[1] * 96
    assert 5 * values < most < 5 * 1.02 * values
    kept = counted(Way(remainder=True, again=True, offload=True), layers=5)
    assert not any("layer inputs" in one for one in kept.timeline)


def test_nothing_is_left_of_passes():
    found = counted(Way(remainder=True, again=True))
    last = found.timeline[-1]
    assert set(last) <= {*KINDS, "kept for reuse"}
    assert last["forward"] + last["backward"] < 0.2 * found.peak
    again = counted(Way(remainder=True, again=True))
    assert again.peak == found.peak
    assert found.at_peak in found.timeline
