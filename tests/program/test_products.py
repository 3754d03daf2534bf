"""The products that a program is said to run are those that it runs: by request on the CPU, by its launches on CUDA."""

import shutil

import pytest
import torch

from lsq import gemm
from lsq.csrc.launch import Product
from lsq.gemm import lookup
from lsq.gemm.cublaslt import Products
from lsq.gemm.product_key import ProductKey
from lsq.ops.registry import fused_available
from lsq.program import kernels, layers
from lsq.program.products import products_of
from tests.csrc.emulated_cublaslt import emulated
from tests.gemm.operands import asked
from tests.layers.shapes import config_of
from tests.program.examples import PROGRAMS
from tests.program.replay import on_the_cpu

NAMES = [name for name in PROGRAMS if "wide" not in name]
fused = pytest.mark.skipif(not fused_available(), reason="references multiply in other ways; needs the C++ library")


def run_on_the_cpu(work):
    """The products that the CPU looks up while `work` is done; there are no files."""
    gemm.set_files([])
    try:
        work()
        return {use.key for use in lookup.table().uses()}
    finally:
        gemm.set_files(None)


def prepared_for_cuda(programs):
    """The products that cuBLASLt, emulated, gets an algorithm for when programs are placed in memory."""
    products = Products(torch.device("cpu"), library=emulated().path)
    try:
        return {
            products.prepare(entry).key
            for program in programs
            for _, launched in kernels.entries(program, kernels.tensors(program, torch.bfloat16, "cpu"))
            for entry in launched
            if isinstance(entry, Product)
        }
    finally:
        products.close()


@fused
@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_that_run_on_the_cpu(name):
    program = PROGRAMS[name]()
    keys = products_of(program)
    assert len(keys) == len(set(keys))
    assert set(keys) == run_on_the_cpu(lambda: on_the_cpu(program))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "logits float"])  # 91 columns, no multiple of 8
def test_products_are_those_that_cuda_launches(name):
    program = PROGRAMS[name]()
    keys = products_of(program, "cuda")
    assert len(keys) == len(set(keys))
    assert set(keys) == prepared_for_cuda([program])


def floats(layout, dtype="float32", **numbers):
    return ProductKey(dtype=dtype, out=dtype, layout=layout, **numbers)


def test_a_linear_layer():
    sizes = dict(m=21, n=32, k=48), dict(m=21, n=48, k=32), dict(m=32, n=48, k=21)
    forward, dx, dweight = sizes
    program = layers.linear(config_of(backward="int8").quant, 21, 48, 32, True, True, True)
    assert products_of(program) == [
        asked("linear_int32", 21, 32, 48),
        asked("linear_input_gradient", 21, 48, 32),
        asked("linear_weight_gradient", 32, 48, 21),
    ]
    padded = {**dweight, "k": 32}
    assert products_of(program, "cuda") == [ProductKey(**forward), ProductKey(**dx), ProductKey(**padded)]
    program = layers.linear(config_of(backward="float").quant, 21, 48, 32, True, True, True)
    assert products_of(program) == [asked("linear_int32", 21, 32, 48)]
    assert products_of(program, "cuda") == [ProductKey(**forward), floats("nn", **dx), floats("tn", **dweight)]
    program = layers.linear(config_of(mode="float").quant, 21, 48, 32, True, True, True)
    assert products_of(program) == []
    wanted = [floats("nt", "bfloat16", **forward), floats("nn", "bfloat16", **dx)]
    assert products_of(program, "cuda")[:2] == wanted


def test_the_vocabulary_is_padded_and_made_again_in_the_backward_pass_once():
    program = layers.vocabulary_loss(config_of(backward="float").quant, 21, 48, 91, 96, 1, 0.1, True, True)
    assert products_of(program) == [asked("vocabulary_cross_entropy", 21, 96, 48)]


def test_on_cuda_the_vocabulary_is_multiplied_by_blocks_of_rows():
    program = layers.vocabulary_loss(config_of(backward="int8").quant, 1500, 48, 91, 96, 1, 0.1, True, True)
    forward = [key.m for key in products_of(program, "cuda") if (key.n, key.k) == (96, 48)]
    assert len(forward) == 2 and sum(forward) == 1500


def test_shapes_that_cuda_does_not_take_are_refused():
    with pytest.raises(ValueError, match="rows of 91 values cannot run on CUDA"):
        products_of(PROGRAMS["logits float"](), "cuda")


def test_an_operation_without_kernels_is_named(monkeypatch):
    program = layers.linear(config_of().quant, 21, 48, 32, True, True, True)
    bare = program.operations[0].definition
    monkeypatch.setitem(bare.__dict__, "cuda", None)
    with pytest.raises(ValueError, match=f"operation {bare.name} has no CUDA implementation"):
        products_of(program, "cuda")
