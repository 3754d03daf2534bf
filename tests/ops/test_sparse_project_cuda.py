"""The product with a sparse weight: the integers of Project, every end; packing."""

import math

import pytest
import torch

from lsq.models.sparsity import choose, pack
from lsq.native import compiler
from lsq.ops.nonlinearity import Activation, Nonlinearity
from lsq.ops.project import Project
from lsq.ops.sparse_project import SparseProject, SparseWeight
from lsq.program.values import Rows
from tests.ops.compare import by_row, empty, on_cpu, refused, to_round
from tests.ops.cuda import DTYPES, compare_cuda
from tests.ops.test_project import operands
from tests.sampling import first


def sparse_operands(rows, inner=48, outputs=32):
    """Those of Project with a weight that is sparse, and that weight packed."""
    found = operands(rows, inner, outputs)
    weight = found["weight"]
    weight.codes *= choose(torch.rand(outputs, inner)) * (torch.rand(outputs, inner) > 0.1)
    packed = pack(weight.codes)
    return found, SparseWeight.of(packed.values, packed.indices, weight.scale)


def rounded(rows, inner, outputs, activation=Activation.none, **given):
    dense, weight = sparse_operands(rows, inner, outputs)
    return SparseProject(
        **dense | {"weight": weight} | given,
        rounded=to_round(rows, outputs, 2.0, clipped=False),
        nonlinearity=Nonlinearity(activation=activation),
    )


def turns():
    """Four steps along K for a warp."""
    compare_cuda(rounded(41, 1040, 32, Activation.gelu))


@pytest.mark.parametrize("inner, outputs", [(16, 16), (48, 32), (64, 48), (336, 144)])
def test_packed_codes_are_the_codes(inner, outputs):
    dense, weight = sparse_operands(1, inner, outputs)
    assert torch.equal(weight.codes(), dense["weight"].codes)
    assert weight.values.numel() + weight.kept.numel() == -(-inner // 64) * 64 * outputs * 5 // 8


def test_rows_that_fill_no_tile_are_refused():
    with refused("24 outputs; kernels need a multiple of 16"):
        packed = pack(torch.zeros(24, 64, dtype=torch.int8))
        SparseWeight.of(packed.values, packed.indices, torch.ones(24))


@pytest.mark.parametrize(
    "rows, inner, outputs",
    first([(41, 80, 48), (0, 64, 32), (1, 16, 16), (9, 64, 16), (70, 336, 144)], 3),
)
def test_integers_are_those_of_project(rows, inner, outputs):
    torch.manual_seed(rows)
    dense, weight = sparse_operands(rows, inner, outputs)
    end = {"rounded": to_round(rows, outputs, 2.0, clipped=False)}
    for x in (dense["x"], Rows(coded=by_row(dense["x"].coded))):
        found = compare_cuda(SparseProject(**dense | {"weight": weight, "x": x}, **end))
        assert torch.equal(
            found.rounded.codes, on_cpu(Project(**dense | {"x": x}, **end)).rounded.codes
        )
    assert torch.equal(found.rounded.scale, found.rounded.clip / found.rounded.largest)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("bias", [True, False])
def test_every_end(activation, bias):
    compare_cuda(rounded(11, 48, 80, activation, **({} if bias else {"bias": None})))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 33])
def test_floats(dtype, rows):
    dense, weight = sparse_operands(rows)
    compare_cuda(SparseProject(**dense | {"weight": weight}, out=empty(rows, 32)), dtype)


def test_nan_poisons_the_scale():
    operation = rounded(3, 48, 144)
    operation.bias[100] = math.nan
    assert compare_cuda(operation).rounded.scale.isnan()


def test_the_cpu_is_refused():
    with refused("PackedWeight.of_sparse"):
        rounded(3, 48, 32).cpu_scratch()


@pytest.mark.parametrize("target", first(["sm_90a", "sm_80", "sm_100"], 0, 1))
def test_it_compiles_without_spilling(target):
    defines = (("ACTIVATION", 1), ("FLOAT", 0), ("STARTED", 0))
    (taken,) = compiler.compile_kernels("sparse_project.cu", defines, target).resources.values()
    assert taken.spill_bytes == 0 and taken.registers <= 128
