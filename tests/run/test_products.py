"""What a program launches on a GPU and the keys of its products, found without one."""

import shutil
from collections import Counter

import pytest
import torch

from lsq import gemm
from lsq.config import LayerConfig, QuantConfig
from lsq.gemm.cublaslt import Products
from lsq.gemm.product_key import ProductKey
from lsq.layers import programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.linear import linear as linear_program
from lsq.layers.programs import Mode, Table
from lsq.native.launch import Product
from lsq.program.samples import placed
from lsq.run.cuda import AbsentGPU, launched_by_operation, products_of
from tests.emulator.emulated_cublaslt import emulated
from tests.gemm.operands import asked
from tests.layers.examples import PROGRAMS, mode_on
from tests.layers.shapes import config_of

NAMES = [name for name in PROGRAMS if "wide" not in name]
WORDS = 91, 48


def prepared_for_cuda(program):
    """The products that cuBLASLt, emulated, gets an algorithm for when a program is placed in
    memory: all of them."""
    products, found = Products(torch.device("cpu"), library=emulated().path), set()
    try:
        with gemm.ended_by(None):
            for operation in program.operations:
                real = placed(operation, "cpu", torch.bfloat16)
                scratch = [torch.empty(shape, dtype=dtype) for shape, dtype in real.cuda_scratch()]
                found |= {
                    products.prepare(one).key
                    for one in real.cuda(*scratch)
                    if isinstance(one, Product)
                }
        return found
    finally:
        products.close()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_that_are_launched(name):
    """Whether a kernel ends them or not."""
    program = PROGRAMS[name]()
    keys = products_of(program)
    assert len(keys) == len(set(keys))
    with gemm.ended_by(None):
        assert set(keys) == set(products_of(program))
    assert set(keys) == prepared_for_cuda(program)


def linear(**options):
    return linear_program(config_of(**options).quant, 21, 48, 32, mode_on("cpu"), bias=True)


def loss(rows, **options):
    mode = mode_on("cpu")
    return programs.vocabulary_loss(
        config_of(**options).quant, rows, *WORDS, mode, padding=1, smoothing=0.1
    )


def floats(layout, dtype="float32", **numbers):
    return ProductKey(dtype=dtype, out=dtype, layout=layout, **numbers)


def test_a_linear_layer():
    sizes = dict(m=21, n=32, k=48), dict(m=21, n=48, k=32), dict(m=32, n=48, k=21)
    forward, dx, dweight = sizes
    assert products_of(linear(backward="int8")) == [
        asked("project", 21, 32, 48),
        asked("project_input_gradient", 21, 48, 32),
        asked("project_weight_gradient", 32, 48, 32),  # filled up
    ]
    assert products_of(linear(backward="float")) == [
        asked("project", 21, 32, 48),
        floats("nn", **dx),
        floats("tn", **dweight),
    ]
    wanted = [floats("nt", "bfloat16", **forward), floats("nn", "bfloat16", **dx)]
    assert products_of(linear(mode="float"))[:2] == wanted


def test_on_cuda_the_vocabulary_of_floats_is_multiplied_by_blocks_of_rows():
    keys = products_of(loss(1500, mode="float"))
    forward = [key.m for key in keys if (key.n, key.k) == (WORDS[0], 48)]
    assert forward == [256, 1500 % 256]  # each product once


def test_on_cuda_the_vocabulary_of_codes_is_not_tuned():
    """Its kernels take the tile of the rule."""
    keys = products_of(loss(1500, backward="int8"))
    assert {key.op for key in keys} == {"project_input_gradient", "project_weight_gradient"}


def test_what_operations_share_is_one_tensor():
    with gemm.ended_by(None):
        first, *others = launched_by_operation(linear(backward="int8"), torch.bfloat16)
    coded = first[0].arguments[0].rounded
    (product,) = (entry for entry in others[0] if isinstance(entry, Product))
    assert product.a is coded.codes and product.a.is_meta
    assert not any(
        product.a is entry.out
        for entries in others
        for entry in entries
        if isinstance(entry, Product)
    )


def test_shapes_that_cuda_does_not_take_are_refused():
    program = linear_program(config_of(mode="float").quant, 21, 48, 91, mode_on("cpu"), bias=True)
    with pytest.raises(ValueError, match="the width of a product with an end is 91"):
        products_of(program)


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
    return Counter(
        "product" if isinstance(entry, Product) else entry.kernel.name
        for entries in launched_by_operation(program, torch.bfloat16)
        for entry in entries
    )


def test_an_encoder_layer():
    """One launch for each operation or product, two more for the gradient of a weight, one for
    scales, one for sums.

    A product and its end are one, but for what ends in codes of rows.
    """
    assert counts(programs.encoder_layer(BIG, SENTENCES, MODE)) == {
        "product": 1,
        "lsq_round": 1,
        "lsq_transpose_codes": 1,
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
    assert launches == {"encoder": 33, "decoder": 56, "loss": 15, "embedding": 6}
    assert (
        LAYERS * (launches["encoder"] + launches["decoder"])
        + launches["loss"]
        + 2 * launches["embedding"]
        == 561
    )
    assert not counts(found["loss"])["product"]
    with gemm.ended_by(None):
        assert counts(programs.encoder_layer(BIG, SENTENCES, MODE)).total() == 47
        assert counts(programs.decoder_layer(BIG, SENTENCES, SENTENCES, MODE)).total() == 82
