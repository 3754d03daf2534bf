"""How much a GPU launches in a training step of Transformer-big, counted without one."""

from collections import Counter

import torch

from lsq import gemm
from lsq.config import LayerConfig, QuantConfig
from lsq.layers import programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.programs import Mode, Table
from lsq.native.launch import Product
from lsq.run.cuda import AbsentGPU
from lsq.run.products import launched

QUANT = QuantConfig(backward="int8")
BIG = LayerConfig(
    hidden=1024,
    heads=16,
    feed_forward=4096,
    dropout=0.3,
    attention_dropout=0.1,
    activation_dropout=0.1,
    quant=QUANT,
)
SENTENCES = PackedSequences(rows=8192, count=256)
LAYERS = 6


MODE = Mode(training=True, backward=True, backend=AbsentGPU())


def counts(program) -> Counter:
    """Launches by kernel; "product" is one of cuBLASLt."""
    entries = launched(program, torch.bfloat16)
    return Counter(
        "product" if isinstance(entry, Product) else entry.kernel.name for entry in entries
    )


def test_an_encoder_layer():
    """One launch for each operation or product, two more for the gradient of a weight, one for
    scales, one for sums.

    A product and its end are one, but for what ends in codes of rows.
    """
    assert counts(programs.encoder_layer(BIG, SENTENCES, MODE)) == {
        "product": 1,
        "lsq_round": 1,
        "lsq_project_product": 4,
        "lsq_attention": 1,
        "lsq_residual_norm": 2,
        "lsq_residual_norm_gradient": 2,
        "lsq_project_input_gradient": 1,
        "lsq_input_gradient_product": 3,
        "lsq_begin_weight_gradient": 4,
        "lsq_round_transposed": 4,
        "lsq_weight_gradient_product": 4,
        "lsq_attention_query_gradient": 1,
        "lsq_attention_key_gradient": 1,
        "lsq_attention_gradient_rows": 1,
        "lsq_start_scales": 1,
        "lsq_finish_sums": 1,
    }


def test_a_step():
    """As docs/gpu.md says. What RoundWeight and the optimizer launch is not in programs."""
    table = Table(
        vocabulary=32768,
        hidden=1024,
        positions=1026,
        padding=1,
        scale=32.0,
        dropout=0.3,
        learned=False,
    )
    found = {
        "encoder": programs.encoder_layer(BIG, SENTENCES, MODE),
        "decoder": programs.decoder_layer(BIG, SENTENCES, SENTENCES, MODE),
        "loss": programs.vocabulary_loss(
            QUANT, SENTENCES.rows, 32768, 1024, MODE, padding=1, smoothing=0.1
        ),
        "embedding": programs.embedding(QUANT, SENTENCES.rows, table, MODE),
    }
    launches = {name: counts(program).total() for name, program in found.items()}
    assert launches == {"encoder": 32, "decoder": 55, "loss": 15, "embedding": 6}
    assert (
        LAYERS * (launches["encoder"] + launches["decoder"])
        + launches["loss"]
        + 2 * launches["embedding"]
        == 549
    )
    assert not counts(found["loss"])["product"]
    with gemm.ended_by(None):
        assert counts(programs.encoder_layer(BIG, SENTENCES, MODE)).total() == 43
        assert counts(programs.decoder_layer(BIG, SENTENCES, SENTENCES, MODE)).total() == 75
