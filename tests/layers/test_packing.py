"""Packing: which rows a padded batch becomes, and how many sizes of them there are."""

import pytest
import torch
from fairseq.data import data_utils

from lsq.layers import Packing, TransformerEncoderLayer
from lsq.layers.blocks import PackedSequences
from lsq.layers.memory import plan_memory
from lsq.layers.packing import packing_options
from lsq.observe import observe
from lsq.run.backends import backend
from tests.layers.shapes import HIDDEN, config_of

PADDING = torch.tensor([[0, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
"""At the end, at the beginning (as fairseq pads sources), nowhere."""


@pytest.mark.parametrize("few_sizes", [False, True])
def test_rows_are_the_real_tokens_and_come_back(few_sizes):
    x = torch.randn(3, 4, 5)
    packing = Packing(PADDING, few_sizes=few_sizes)
    rows = packing.pack(x, fill=7)
    assert packing.rows == 9 and len(rows) == packing.sentences.rows == (16 if few_sizes else 9)
    assert torch.equal(rows[:9], x[~PADDING]) and (rows[9:] == 7).all()
    assert torch.equal(packing.unpack(rows), x.masked_fill(PADDING[..., None], 0))
    assert packing.cu_seqlens.tolist()[:4] == [0, 3, 5, 9] and set(
        packing.cu_seqlens.tolist()[4:]
    ) <= {9}
    assert len(packing.cu_seqlens) == packing.sentences.count + 1
    assert packing.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3] + [0] * (len(rows) - 9)


def test_whole_sentences_are_rows_as_they_lie():
    x = torch.randn(3, 4, 5)
    for packing in (Packing(shape=(3, 4)), Packing(torch.zeros(3, 4, dtype=torch.bool))):
        assert packing.pack(x).data_ptr() == x.data_ptr() and packing.cu_seqlens.tolist() == [
            0,
            4,
            8,
            12,
        ]
        assert packing.positions.tolist() == [0, 1, 2, 3] * 3


def test_gradients_go_back_to_the_tokens():
    x = torch.randn(3, 4, 5, requires_grad=True)
    Packing(PADDING, few_sizes=True).pack(x).sum().backward()
    assert torch.equal(x.grad, (~PADDING)[..., None].expand(3, 4, 5).float())


@pytest.mark.parametrize(
    "rows, count", [(1, 1), (16, 3), (17, 2), (300, 40), (4097, 4097), (8192, 80)]
)
def test_filled_sizes_are_large_enough_and_not_much_larger(rows, count):
    filled = PackedSequences(rows=rows, count=count).filled()
    assert filled.rows >= rows and filled.count >= count and filled.rows % 16 == 0
    assert filled.rows < max(1.25 * rows, rows + 16)
    assert filled == PackedSequences(rows=filled.rows, count=count).filled()


@pytest.mark.thorough
def test_an_epoch_has_a_few_dozen_sizes():
    """Of log-normal lengths, 24 tokens on average, in batches as fairseq makes them."""
    generator = torch.Generator().manual_seed(1)
    source = (
        (torch.randn(60_000, generator=generator).mul(0.8).add(2.86).exp() + 1).int().clamp(max=256)
    )
    target = (source * (1 + 0.2 * torch.randn(60_000, generator=generator))).int().clamp(2, 256)
    order = sorted(range(60_000), key=lambda one: (source[one], target[one]))
    batches = data_utils.batch_by_size(
        order,
        lambda one: int(max(source[one], target[one])),
        max_tokens=4096,
        required_batch_size_multiple=8,
    )

    def sizes(lengths, batch) -> PackedSequences:
        return PackedSequences(rows=int(lengths[batch].sum()), count=len(batch)).filled()

    found = [(sizes(source, batch), sizes(target, batch)) for batch in map(list, batches)]
    assert len(batches) > 300 and len({one for one, _ in found}) <= 24 and len(set(found)) <= 60


def test_sizes_are_exact_where_clips_are_measured_or_observed_and_outside_of_training():
    layer = TransformerEncoderLayer(config_of())
    assert packing_options(layer) == {"backend": layer.target, "few_sizes": False}
    layer.backend = backend("emulated")
    assert not packing_options(layer)["few_sizes"]  # the first pass measures
    layer(torch.randn(5, 2, HIDDEN))
    layer.schedule.passes = 30
    assert packing_options(layer) == {"backend": layer.backend, "few_sizes": True}
    with observe(layer):
        assert not packing_options(layer)["few_sizes"]
    assert not packing_options(layer.eval())["few_sizes"]


def test_a_filled_batch_trains_as_the_batch_itself():
    """In the emulator: the same integers, and sums of the same numbers and zeros."""
    torch.manual_seed(0)
    layer = TransformerEncoderLayer(config_of(dropout=0.1, backward="int8"))
    layer.backend = backend("emulated")
    x, padding = torch.randn(4, 3, HIDDEN), PADDING
    layer(x, padding)
    layer.schedule.passes = 30
    results = []
    for few_sizes in (False, True):
        packing = Packing(padding, backend=layer.backend, few_sizes=few_sizes)
        torch.manual_seed(1)
        layer.zero_grad()
        y = packing.unpack(layer.rows(packing.pack(x.transpose(0, 1)), packing))
        y.square().sum().backward()
        layer.schedule.passes = 30
        results.append([y.detach(), *(parameter.grad for parameter in layer.parameters())])
    for exact, filled in zip(*results, strict=True):
        torch.testing.assert_close(filled, exact, rtol=1e-5, atol=1e-6)


def test_statistics_are_of_the_batch_alone():
    torch.manual_seed(0)
    layer = TransformerEncoderLayer(config_of(calibration_passes=0))
    x, found = torch.randn(17, 1, HIDDEN), []
    layer(x)  # measures
    for name in ("cpu", "emulated"):
        layer.backend = backend(name)
        with observe(layer) as statistics:
            layer(x)
        found.append(statistics["self_attn.input"].zero_share)
    assert found[0] == found[1] < 0.1


@pytest.mark.thorough
def test_a_plan_has_room_for_filled_batches():
    torch.manual_seed(0)
    layer = TransformerEncoderLayer(config_of(backward="int8"))
    layer.backend = backend("emulated")
    plan_memory(layer, lambda: layer(torch.randn(19, 1, HIDDEN)).sum())
    layer(torch.randn(19, 1, HIDDEN)).sum().backward()  # measures, in exact sizes
    layer.schedule.passes = 30
    for time in (17, 19, 19):
        layer(torch.randn(time, 1, HIDDEN)).sum().backward()
    rows = {program.outputs[0].shape[0] for program, *_ in layer.step_memory.prepared}
    assert rows == {32}, (
        "the size that the others are filled up to; the pass that measures is not prepared"
    )
