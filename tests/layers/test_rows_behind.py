"""Rows behind the last sentence, and empty sentences at the end, change nothing: zeros in, nothing
out of them."""

import pytest
import torch

from lsq.layers import programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.programs import Table, Vocabulary
from lsq.run.backends import backend
from tests.layers.examples import SENTENCES, SOURCE, drawn_for, mode_on, run
from tests.layers.shapes import config_of
from tests.sampling import first

OPTIONS = [
    {"backward": "int8", "dropout": 0.1},
    {"backward": "float", "activation": "gelu", "pre_norm": True},
    {"mode": "float", "dropout": 0.1, "norm": "rms"},
    {"backward": "int8", "pre_norm": True, "activation": "gelu"},
    {"backward": "int8", "gated": True, "activation": "silu", "pre_norm": True, "bias": False},
]
PADDING = 1
KINDS = (
    "encoder",
    "decoder",
    "decoder of more targets",
    "decoder of more sources",
    "linear",
    "feed-forward",
    "loss",
    "embedding",
)
BEHIND = {"tokens": PADDING, "target": PADDING}
"""What stands in rows behind, where that is not 0."""


def program_of(kind: str, options: dict, where, more: int = 0):
    """A program for small sizes, or for more rows and sentences than those."""
    config, mode = config_of(**options), mode_on(where)
    sentences, source = (
        one
        if f"of more {other}" in kind
        else PackedSequences(rows=one.rows + 7 * more, count=one.count + more)
        for one, other in ((SENTENCES, "sources"), (SOURCE, "targets"))
    )
    rows = sentences.rows
    if kind == "encoder":
        return programs.encoder_layer(config, sentences, mode, causal=config.pre_norm)
    if kind.startswith("decoder"):
        return programs.decoder_layer(config, sentences, source, mode)
    if kind == "linear":
        return programs.linear(config.quant, rows, config.hidden, 32, mode, bias=True)
    if kind == "feed-forward":
        return programs.feed_forward(config, rows, mode)
    if kind == "loss":
        words = Vocabulary(
            words=91, hidden=config.hidden, padded=96 if config.quant.quantized else 91
        )
        return programs.vocabulary_loss(
            config.quant, rows, words, mode, padding=PADDING, smoothing=0.1
        )
    size = {"vocabulary": 11, "hidden": config.hidden, "positions": 9}
    table = Table(**size, padding=PADDING, scale=2.0, dropout=0.1, learned=True)
    return programs.embedding(config.quant, rows, table, mode)


def extended(name: str, tensor: torch.Tensor, size: torch.Size) -> torch.Tensor:
    """A tensor with rows behind it, or offsets with empty sentences behind them."""
    whole = tensor.new_full(size, BEHIND.get(name, 0))
    if name.endswith("cu_seqlens"):
        whole.fill_(tensor[-1])
    whole[: len(tensor)] = tensor
    return whole


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", first(["cpu", "reference", "emulated"], 1))
def test_rows_behind_change_nothing(kind, options, name):
    where = backend(name)
    few, many = (program_of(kind, options, where, more) for more in (0, 3))
    given = drawn_for(few)
    sizes = {
        virtual.name: virtual.shape
        for virtual in (*many.inputs, *many.parameters, *many.output_gradients)
    }
    more = {
        virtual: extended(virtual, tensor, torch.Size(sizes[virtual]))
        for virtual, tensor in given.items()
    }
    wanted, found = run(few, where, given), run(many, where, more)
    assert found.keys() == wanted.keys()
    for virtual, one in wanted.items():
        other = found[virtual]
        if other.dtype.is_floating_point:
            torch.testing.assert_close(
                {virtual: other[: len(one)]}, {virtual: one}, atol=1e-5, rtol=1e-5
            )
        else:
            assert torch.equal(other[: len(one)], one), virtual
        behind = other[len(one) :]
        assert behind.isfinite().all(), virtual
        if virtual.startswith("d_") or "context" in virtual:
            assert not behind.any(), virtual
