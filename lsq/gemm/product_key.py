"""ProductKey, which describes a matrix product without its tensors: the key of tuned files.

out [M, N] = a [M, K] times b [N, K] transposed. Every error of a key is a ValueError that begins
with the name of the field.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from lsq.files.json_file import check_choice, check_whole
from lsq.gemm.operations import LARGEST_INNER, OVER_TOKENS, TILED, TILED_ALONE
from lsq.native.launch import Product

LARGEST_DIMENSION = 2**31 - 1
EXACT_TOKENS = 512
"""Up to this number of tokens each number has an entry, above it each multiple of TOKEN_STEP."""
TOKEN_STEP = 32

LAYOUTS = ("nt", "nn", "tt", "tn")
"""First letter: a is stored as [M, K] ("n") or [K, M] ("t"); second: b as [K, N] ("n") or [N, K]
("t")."""
OUTS = {"int8": ("int32",), "bfloat16": ("bfloat16", "float32"), "float32": ("float32",)}
"""dtype of the operands -> dtypes of the result."""
MATMUL = Product.op
"""A product without an epilogue: of floats, or where another kernel applies the epilogue."""


@dataclass(frozen=True, kw_only=True)
class ProductKey:
    """The description of a product. The name of an operation implies everything but m, n and k.
    Raises ValueError: there is no such product."""

    op: str = MATMUL
    """One of TILED and TILED_ALONE, or MATMUL."""
    m: int
    n: int
    k: int
    dtype: str = "int8"
    """dtype of a and b."""
    out: str = "int32"
    layout: str = "nt"
    """One of LAYOUTS."""
    leading_a: int | None = None
    """Elements from one stored row of a to the next; None: rows are packed."""
    leading_b: int | None = None
    leading_out: int | None = None

    def __post_init__(self) -> None:
        check_choice("op", self.op, (*TILED, *TILED_ALONE, MATMUL))
        for name in ("m", "n", "k"):
            check_whole(name, getattr(self, name), 1, LARGEST_DIMENSION)
        check_choice("dtype", self.dtype, OUTS)
        check_choice("out", self.out, OUTS[self.dtype])
        check_choice("layout", self.layout, LAYOUTS)
        if self.dtype == "int8":
            check_whole("k", self.k, 1, LARGEST_INNER)
        leading = self.leading
        for name, (_, columns) in self.matrices.items():
            check_whole(f"leading_{name}", leading[f"leading_{name}"], columns, LARGEST_DIMENSION)
            if leading[f"leading_{name}"] == columns:
                object.__setattr__(self, f"leading_{name}", None)
        given = [name for name in self.fields() if name not in ("op", "m", "n", "k")]
        if given and self.op != MATMUL:
            raise ValueError(
                f"{given[0]} is {getattr(self, given[0])!r}; {self.op} says that itself: leave it"
                " out"
            )

    @property
    def by_itself(self) -> "ProductKey":
        """The product of packed operands along K that cuBLASLt computes for an operation."""
        return self if self.op == MATMUL else ProductKey(m=self.m, n=self.n, k=self.k)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of a, b and out as they are stored."""
        a, b = (self.m, self.k), (self.n, self.k)
        a, b = a[::-1] if self.layout[0] == "t" else a, b[::-1] if self.layout[1] == "n" else b
        return {"a": a, "b": b, "out": (self.m, self.n)}

    @property
    def leading(self) -> dict[str, int]:
        """leading_a, leading_b and leading_out; packed rows have their number of columns."""
        packed = {f"leading_{name}": columns for name, (_, columns) in self.matrices.items()}
        return packed | {name: vars(self)[name] for name in packed if vars(self)[name] is not None}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {
            name: getattr(torch, self.out if name == "out" else self.dtype)
            for name in ("a", "b", "out")
        }

    @property
    def lengths(self) -> dict[str, int]:
        """Elements from the first to the last of a, b and out."""
        leading = self.leading
        return {
            name: (rows - 1) * leading[f"leading_{name}"] + columns
            for name, (rows, columns) in self.matrices.items()
        }

    @property
    def bytes(self) -> int:
        """Bytes of a, b and out together."""
        return sum(length * self.dtypes[name].itemsize for name, length in self.lengths.items())

    def fields(self) -> dict[str, Any]:
        """Return m, n, k and all fields that differ from their defaults."""
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: value for name, value in vars(self).items() if value != usual[name]}

    @property
    def token_dimension(self) -> str:
        """The dimension that differs from batch to batch: "m" or "k"."""
        return "k" if self.op == OVER_TOKENS else "m"

    @property
    def tokens(self) -> int:
        return getattr(self, self.token_dimension)

    def with_tokens(self, tokens: int) -> "ProductKey":
        return dataclasses.replace(self, **{self.token_dimension: tokens})

    def rounded(self) -> "ProductKey":
        """Return the key whose entry in files serves this product; for MATMUL, the key itself."""
        tokens = rounded_tokens(self.tokens)
        if self.op == OVER_TOKENS:
            tokens = min(tokens, LARGEST_INNER)
        return self if tokens == self.tokens or self.op == MATMUL else self.with_tokens(tokens)

    @property
    def family(self) -> tuple:
        """A value that all batch sizes of this product share."""
        return tuple(value for name, value in vars(self).items() if name != self.token_dimension)

    @property
    def arithmetic(self) -> int:
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        leading = self.leading
        rest = [f"{name} {value}" for name, value in self.fields().items() if name in leading]
        return (
            f"{self.op} {self.m} x {self.n} x {self.k} ({self.dtype} to {self.out},"
            f" {', '.join([self.layout, *rest])})"
        )


def rounded_tokens(tokens: int) -> int:
    if tokens <= EXACT_TOKENS:
        return tokens
    return min(-(-tokens // TOKEN_STEP) * TOKEN_STEP, LARGEST_DIMENSION)


def key_of(product: Product) -> ProductKey:
    """Return the key of a product of tensors, which may be on "meta". a is [M, K] or transposed [K,
    M], b [N, K] or [K, N], out [M, N]. Rows are contiguous, for an operation also packed. Raises
    ValueError: shapes, dtypes or strides do not fit."""
    a, b = product.a, product.b
    tensors = {"a": a, "b": b, "out": product.out}
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    if any(tensor.dim() != 2 for tensor in tensors.values()):
        raise ValueError(f"the tensors of a product are matrices, not {shapes}")
    m, k = reversed(a.shape) if product.transpose_a else a.shape
    n, inner = reversed(b.shape) if product.transpose_b else b.shape
    if inner != k or product.out.shape != (m, n):
        raise ValueError(
            f"{shapes} do not fit: out [M, N] of a {'[K, M]' if product.transpose_a else '[M, K]'}"
            f" and b {'[K, N]' if product.transpose_b else '[N, K]'}"
        )
    if a.dtype != b.dtype:
        raise ValueError(f"a is {a.dtype} and b is {b.dtype}; convert one of them")
    key = ProductKey(
        m=m,
        n=n,
        k=k,
        dtype=_name(a.dtype),
        out=_name(product.out.dtype),
        layout=("t" if product.transpose_a else "n") + ("n" if product.transpose_b else "t"),
        **{f"leading_{name}": _leading(name, tensor) for name, tensor in tensors.items()},
    )
    if product.op == MATMUL:
        return key
    requested_key = ProductKey(op=product.op, m=m, n=n, k=k)
    if requested_key.by_itself != key:
        raise ValueError(f"{product.op} multiplies {requested_key.by_itself} on a GPU, not {key}")
    return requested_key


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _leading(name: str, tensor: torch.Tensor) -> int | None:
    """Return the elements from one row to the next; None for a single row."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"the rows of {name} are contiguous, not strided by {tensor.stride(-1)}; copy it first"
        )
    return tensor.stride(0) if tensor.shape[0] > 1 else None
