"""The matrix products of a program, as the keys of tuned products.

M rows of activations, N outputs and K inputs of a weight.
"""

from collections.abc import Callable

from lsq.gemm.product_key import ProductKey
from lsq.program.program import Program
from lsq.program.tensor import Operation

FLOAT = "bfloat16"
"""What the float products of a GPU multiply."""


def products_of(program: Program, kind: str = "cpu") -> list[ProductKey]:
    """What the operations of a program multiply, each product once, in the order of the program.

    Args:
        program: with or without a backward pass.
        kind: "cpu": the int8 products; "cuda": those as a GPU runs them, and the products of floats.
    """
    found = []
    for operation in program.operations:
        products = _PRODUCTS.get(operation.name)
        if products is not None:
            found += products(operation)
    if kind == "cpu":
        found = [key for key in found if key.dtype == "int8"]
    return list(dict.fromkeys(found))


def _forward(op: str) -> Callable[[Operation], list[ProductKey]]:
    def products(operation: Operation) -> list[ProductKey]:
        x, x_scale, weight = operation.inputs[:3]
        (m, k), (n, _) = x.shape, weight.shape
        return [_float(m, n, k, "nt") if x_scale is None else ProductKey.of(op, m, n, k)]

    return products


def _input_gradient(operation: Operation) -> list[ProductKey]:
    gradient, row_scale, weight = operation.inputs[:3]
    (m, n), (_, k) = gradient.shape, weight.shape
    return [_float(m, k, n, "nn") if row_scale is None else ProductKey.of("linear_input_gradient", m, k, n)]


def _weight_gradient(operation: Operation) -> list[ProductKey]:
    gradient, row_scale, codes = operation.inputs[:3]
    (m, n), (_, k) = gradient.shape, codes.shape
    return [_float(n, k, m, "tn") if row_scale is None else ProductKey.of("linear_weight_gradient", n, k, m)]


def _float_product(layout: str) -> Callable[[Operation], list[ProductKey]]:
    """Of operations in float mode, whose operands are the first two inputs as they lie."""

    def products(operation: Operation) -> list[ProductKey]:
        a, b = (tensor.shape for tensor in operation.inputs[:2])
        k, m = a if layout[0] == "t" else reversed(a)
        return [_float(m, b[0] if layout[1] == "t" else b[1], k, layout)]

    return products


def _float(m: int, n: int, k: int, layout: str) -> ProductKey:
    return ProductKey(op="matmul", m=m, n=n, k=k, dtype=FLOAT, out=FLOAT, layout=layout)


_PRODUCTS = {
    "linear_int8": _forward("linear_int8"),
    "linear_int32": _forward("linear_int32"),
    "vocabulary_cross_entropy": _forward("vocabulary_cross_entropy"),
    "vocabulary_cross_entropy_gradient": _forward("vocabulary_cross_entropy"),
    "linear_input_gradient": _input_gradient,
    "linear_weight_gradient": _weight_gradient,
    "linear": _float_product("nt"),
    "linear_input_gradient_float": _float_product("nn"),
    "linear_weight_gradient_float": _float_product("tn"),
}
"""Operation -> the products that it runs. An operation that multiplies and is missing here fails a test."""
