"""Small programs that tests of builder and executor share."""

import torch

from lsq.config import QuantConfig
from lsq.layers.builder import LayerBuilder
from lsq.layers.linear import linear
from lsq.ops.project import Project
from lsq.ops.rounding import Round
from lsq.program.backend import Backend
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Coded, Rows
from lsq.run.backends import backend
from tests.layers.examples import mode_on

FLOAT = QuantConfig(mode="float")


def builder(
    quant: QuantConfig = FLOAT, *, training=True, backward=True, where: Backend | None = None
) -> LayerBuilder:
    """An empty program called tiny."""
    return LayerBuilder(
        "tiny", quant, training=training, backward=backward, backend=where or backend("cpu")
    )


def project(
    b: LayerBuilder,
    x,
    weight: str,
    shape,
    *,
    bias=None,
    rows=None,
    result="y",
    clip=None,
    accumulates=False,
) -> VirtualTensor | Coded:
    """x [M, K], rounded or as floats, times a weight [N, K]: floats, or rounded under a clip."""
    w = b.weight(weight, shape, rows=rows)
    coded = isinstance(x, Coded)
    size = ((x.codes if coded else x).shape[0], rows or shape[0])
    rounded = b.coded(result, size, clip) if clip else None
    out = None if clip else b.tensor(result, size)
    rows = Rows(coded=x) if coded else Rows(floats=x)
    b.add(Project(x=rows, weight=w, bias=bias, out=out, rounded=rounded, accumulates=accumulates))
    return rounded or out


def rounded(b: LayerBuilder, x: VirtualTensor, name: str = "x") -> Coded:
    """x under the clip `name`_clip."""
    return b.add(Round(x=x, rounded=b.coded(name, x.shape, name + "_clip"))).rounded


def linear_program(*, backward: bool = True, where: str = "cpu"):
    """x [5, 4] -> y [5, 3], with a bias, in float mode."""
    return linear(FLOAT, 5, 4, 3, mode_on(where, backward=backward), bias=True)


def linear_tensors() -> dict[str, torch.Tensor]:
    """What it needs."""
    return {
        "x": torch.randn(5, 4),
        "weight": torch.randn(3, 4),
        "bias": torch.randn(3),
        "random_key": torch.zeros(1, dtype=torch.int64),
    }
