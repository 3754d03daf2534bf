"""Representative GEMM + epilogue operations, of virtual tensors, that the tuner times."""

import torch

from lsq.config import QuantConfig
from lsq.gemm.product_key import ProductKey
from lsq.ops import input_gradient, project, weight_gradient
from lsq.ops.input_gradient import ProjectInputGradient
from lsq.ops.project import Project
from lsq.ops.weight_gradient import ProjectWeightGradient
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Coded, RoundedGradient, Rows, Weight
from lsq.quant import GRADIENT

QUANT = QuantConfig(backward="int8")


def projection(key: ProductKey) -> Project:
    """Return a projection of M rows, N outputs and K inputs, with bias and rounding."""
    return Project(
        x=Rows(coded=_coded("x", key.m, key.k)),
        weight=Weight(
            format=QUANT.weights,
            codes=_codes("weight", key.n, key.k),
            scale=_tensor("scales", key.n),
        ),
        bias=_tensor("bias", key.n),
        rounded=_coded("out", key.m, key.n),
    )


def gradient_of_input(key: ProductKey) -> ProjectInputGradient:
    """Return an input gradient of M rows, N inputs and K outputs, with a mask and `added`."""
    weight = Weight(
        format=QUANT.weights,
        codes=_codes("weight", key.k, key.n),
        transposed=_codes("transposed", key.n, key.k),
        scale=_tensor("scales", key.k),
    )
    return ProjectInputGradient(
        gradient=_rounded(key.m, key.k),
        weight=weight,
        x=_coded("x", key.m, key.n),
        added=_tensor("added", key.m, key.n),
        dx=_tensor("dx", key.m, key.n),
    )


def gradient_of_weight(key: ProductKey) -> ProjectWeightGradient:
    """Return a PACT weight gradient of M outputs, N inputs, K rows; operand kernels run as well."""
    weight = Weight(
        format=QUANT.weights,
        codes=_codes("weight", key.m, key.n),
        scale=_tensor("scales", key.m),
        values=_tensor("values", key.m, key.n),
        clip=_tensor("clip", key.m),
    )
    return ProjectWeightGradient(
        gradient=_rounded(key.k, key.m),
        x=Rows(coded=_coded("x", key.k, key.n)),
        weight=weight,
        key=_tensor("key", 1, dtype=torch.int64),
        dweight=_tensor("dweight", key.m, key.n),
    )


OPERATIONS = {
    project.GEMM: projection,
    input_gradient.GEMM: gradient_of_input,
    weight_gradient.GEMM: gradient_of_weight,
}
"""`ProductKey.op` -> function that makes the operation with that product."""


def _tensor(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> VirtualTensor:
    return VirtualTensor(name=name, shape=shape, dtype=dtype)


def _codes(name: str, *shape: int) -> VirtualTensor:
    return _tensor(name, *shape, dtype=torch.int8)


def _coded(name: str, rows: int, columns: int) -> Coded:
    clipped = _tensor(f"{name}_clipped", -(-rows * columns // 8), dtype=torch.uint8)
    return Coded(
        format=QUANT.activations,
        codes=_codes(name, rows, columns),
        scale=_tensor(f"{name}_scale", 1),
        clipped=clipped,
        clip=_tensor(f"{name}_clip", 1),
    )


def _rounded(rows: int, columns: int) -> RoundedGradient:
    return RoundedGradient(
        format=GRADIENT,
        codes=_codes("gradient", rows, columns),
        scale=_tensor("row_scales", rows),
        weight_scale=_tensor("weight_scales", columns),
        key=_tensor("key", 1, dtype=torch.int64),
        subsequence=0,
    )
