"""The products that a program is said to run are those that it runs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lsq.gemm.product_key import ProductKey
from lsq.ops.registry import fused_available
from lsq.program import layers
from lsq.program.products import products_of
from tests.layers.shapes import config_of
from tests.program.examples import PROGRAMS
from tests.program.replay import on_the_cpu


class Products(TorchDispatchMode):
    """Notes the products of matrices that torch is asked for: (whether int8, m, n, k)."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten._int_mm):
            (m, k), (_, n) = (operand.shape for operand in arguments[:2])
            self.found.add((arguments[0].dtype == torch.int8, m, n, k))
        return function(*arguments, **options or {})


@pytest.mark.skipif(not fused_available(), reason="references multiply in other ways; needs the C++ library")
@pytest.mark.parametrize("name", [name for name in PROGRAMS if "wide" not in name])
def test_products_are_those_that_run(name):
    program = PROGRAMS[name]()
    with Products() as seen:
        on_the_cpu(program)
    keys = products_of(program, "cuda")
    assert {(key.dtype == "int8", key.m, key.n, key.k) for key in keys} == seen.found
    integers = products_of(program, "cpu")
    assert integers == [key for key in keys if key.dtype == "int8"]


def test_a_linear_layer():
    quant = config_of(backward="int8").quant
    program = layers.linear(quant, 21, 48, 32, True, True, True)
    assert products_of(program) == [
        ProductKey.of("linear_int32", 21, 32, 48),
        ProductKey.of("linear_input_gradient", 21, 48, 32, "nn"),
        ProductKey.of("linear_weight_gradient", 32, 48, 21, "tn"),
    ]
    program = layers.linear(config_of(backward="float").quant, 21, 48, 32, True, True, True)
    floats = {"dtype": "bfloat16", "out": "bfloat16"}
    assert products_of(program, "cuda") == [
        ProductKey.of("linear_int32", 21, 32, 48),
        ProductKey(op="matmul", m=21, n=48, k=32, layout="nn", **floats),
        ProductKey(op="matmul", m=32, n=48, k=21, layout="tn", **floats),
    ]
    assert products_of(program) == [ProductKey.of("linear_int32", 21, 32, 48)]


def test_float_mode_multiplies_the_same_shapes():
    for mode in ("int8", "float"):
        program = layers.linear(config_of(mode=mode, backward="float").quant, 21, 48, 32, True, True, True)
        shapes = [(key.m, key.n, key.k, key.layout) for key in products_of(program, "cuda")]
        assert shapes == [(21, 32, 48, "nt"), (21, 48, 32, "nn"), (32, 48, 21, "tn")]


def test_the_vocabulary_is_padded_and_made_again_in_the_backward_pass_once():
    program = layers.vocabulary_loss(config_of(backward="float").quant, 21, 48, 91, 96, 1, 0.1, True, True)
    keys = products_of(program)
    assert keys == [ProductKey.of("vocabulary_cross_entropy", 21, 96, 48)]
