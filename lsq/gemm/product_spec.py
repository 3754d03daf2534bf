"""What cuBLASLt may be asked to multiply: products described by numbers, and read from tensors.

out [M, N] = alpha * a [M, K] times b [N, K] transposed: operands that are contiguous along K are the plain case, the
only one for int8. "transposed" says that an operand lies the other way, a as [K, M] or b as [K, N].
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from lsq.csrc.products import ALPHAS
from lsq.gemm.product import check_inner

OPERAND_ALIGNMENT = 16
_OUT_DTYPES = {
    torch.int8: (torch.int32, torch.int8),
    torch.bfloat16: (torch.bfloat16, torch.float32),
    torch.float16: (torch.float16, torch.float32),
    torch.float32: (torch.float32,),
}


class Operands(Protocol):
    """A product of tensors, e.g. lsq.csrc.launch.Product."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    alpha: torch.Tensor | float
    transpose_a: bool
    transpose_b: bool


@dataclass(frozen=True, kw_only=True)
class ProductSpec:
    """What is multiplied, without the tensors: the key of everything that is remembered about a product.

    Raises:
        ValueError: cuBLASLt has no such product.
    """

    m: int
    """Rows of out."""
    n: int
    """Columns of out."""
    k: int
    """Inner dimension."""
    dtype: torch.dtype
    """Of a and b."""
    out_dtype: torch.dtype
    alpha: str = "one"
    """"one"; "scalar": a float; "vector": float32 [N] on the device, for int8 to int8."""
    transpose_a: bool = False
    """a lies as [K, M]."""
    transpose_b: bool = False
    """b lies as [K, N]."""
    batch: int = 1
    leading_a: int | None = None
    """Elements from one row of a, as it lies, to the next; by default the rows are packed."""
    leading_b: int | None = None
    leading_out: int | None = None
    stride_a: int | None = None
    """Elements from one matrix of the batch to the next, 0: the same one; by default the matrices are packed."""
    stride_b: int | None = None
    stride_out: int | None = None

    def __post_init__(self) -> None:
        self._check_kind()
        for name in ("m", "n", "k", "batch"):
            _check_range(name, getattr(self, name), 1)
        for name, rows, columns in self._matrices():
            self._set_packed(f"leading_{name}", columns)
            leading = getattr(self, f"leading_{name}")
            _check_range(f"leading_{name}", leading, columns)
            self._set_packed(f"stride_{name}", rows * leading if self.batch > 1 else 0)
            extent = (rows - 1) * leading + columns
            _check_range(f"stride_{name}", getattr(self, f"stride_{name}"), extent * (name == "out" and self.batch > 1))
        if self.dtype == torch.int8:
            self._check_integers()

    def _matrices(self) -> list[tuple[str, int, int]]:
        """(name, rows, columns) of the matrices as they lie."""
        a = (self.k, self.m) if self.transpose_a else (self.m, self.k)
        b = (self.k, self.n) if self.transpose_b else (self.n, self.k)
        return [("a", *a), ("b", *b), ("out", self.m, self.n)]

    def _set_packed(self, name: str, value: int) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _check_kind(self) -> None:
        if self.dtype not in _OUT_DTYPES:
            allowed = ", ".join(map(str, _OUT_DTYPES))
            raise ValueError(f"cuBLASLt multiplies {allowed} here, not {self.dtype}; convert the operands")
        outs = _OUT_DTYPES[self.dtype]
        if self.out_dtype not in outs:
            allowed = " or ".join(map(str, outs))
            raise ValueError(f"a product of {self.dtype} gives {allowed}, not {self.out_dtype}; convert it afterwards")
        if self.alpha not in ALPHAS:
            raise ValueError(f"alpha is one of {', '.join(ALPHAS)}, not {self.alpha!r}")
        if self.alpha != "one" and self.out_dtype == torch.int32:
            raise ValueError(f'int32 sums are not scaled: alpha is "one", not {self.alpha!r}; scale what reads them')
        if self.alpha == "vector" and self.out_dtype != torch.int8:
            raise ValueError(f'alpha "vector" is for int8 results, not {self.out_dtype}; scale what reads them')

    def _check_integers(self) -> None:
        check_inner(self.k)
        if self.transpose_a or self.transpose_b:
            raise ValueError(
                "an int8 product takes a [M, K] and b [N, K], neither transposed "
                f"(transpose_a={self.transpose_a}, transpose_b={self.transpose_b}); write the transpose first"
            )
        multiples = {
            "k": 16,
            "leading_a": 16,
            "leading_b": 16,
            "stride_a": 16,
            "stride_b": 16,
            "n": 4,
            "leading_out": 4,
        }
        for name, multiple in multiples.items():
            value = getattr(self, name)
            if value % multiple:
                wider = math.ceil(value / multiple) * multiple
                raise ValueError(
                    f"{name} of an int8 product is a multiple of {multiple}, not {value}; pad it to {wider}"
                )


def _check_range(name: str, value: int, smallest: int) -> None:
    if not smallest <= value < 2**31:
        raise ValueError(f"{name} is {value}; it must be from {smallest} to {2**31 - 1}")


def spec_for(product: Operands) -> ProductSpec:
    """The spec of a product of tensors.

    a [M, K] or [K, M] transposed, b [N, K] or [K, N] transposed, out [M, N], all of them batched ([batch, rows,
    columns]) or none; rows contiguous, at multiples of 16 bytes. alpha is a float or float32 [N].

    Raises:
        ValueError: shapes, dtypes, devices, strides or addresses that do not fit.
    """
    tensors = {"a": product.a, "b": product.b, "out": product.out}
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    if {tensor.dim() for tensor in tensors.values()} not in ({2}, {3}):
        raise ValueError(f"the tensors of a product are all matrices or all batches of matrices, not {shapes}")
    a, b = product.a, product.b
    m, k = reversed(a.shape[-2:]) if product.transpose_a else a.shape[-2:]
    n, inner = reversed(b.shape[-2:]) if product.transpose_b else b.shape[-2:]
    if inner != k or product.out.shape[-2:] != (m, n) or len({tuple(t.shape[:-2]) for t in tensors.values()}) > 1:
        raise ValueError(
            f"{shapes} do not fit: out [M, N] of a {'[K, M]' if product.transpose_a else '[M, K]'} "
            f"and b {'[K, N]' if product.transpose_b else '[N, K]'}"
        )
    if a.dtype != b.dtype:
        raise ValueError(f"a is {a.dtype} and b is {b.dtype}; convert one of them")
    alpha = product.alpha
    if isinstance(alpha, torch.Tensor):
        tensors["alpha"] = alpha
        if alpha.dtype != torch.float32 or alpha.shape != (n,) or not alpha.is_contiguous():
            raise ValueError(f"alpha is contiguous float32 [{n}], not {alpha.dtype} {list(alpha.shape)}")
    devices = {name: str(tensor.device) for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"the tensors of a product lie on one device, not {devices}")
    kind = "vector" if isinstance(alpha, torch.Tensor) else "one" if alpha == 1 else "scalar"
    spaces = {}
    for name in ("a", "b", "out"):
        spaces[f"leading_{name}"], spaces[f"stride_{name}"] = _spacing(name, tensors[name])
    return ProductSpec(
        m=m,
        n=n,
        k=k,
        dtype=a.dtype,
        out_dtype=product.out.dtype,
        alpha=kind,
        transpose_a=product.transpose_a,
        transpose_b=product.transpose_b,
        batch=a.shape[0] if a.dim() == 3 else 1,
        **spaces,
    )


def _spacing(name: str, tensor: torch.Tensor) -> tuple[int | None, int | None]:
    """The leading dimension and the stride of the batch; None where there is a single row or matrix."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"the rows of {name} are contiguous, not strided by {tensor.stride(-1)}; copy it first")
    if tensor.data_ptr() % OPERAND_ALIGNMENT:
        raise ValueError(
            f"{name} starts at a multiple of {OPERAND_ALIGNMENT} bytes, not at {tensor.data_ptr():#x}; copy it"
        )
    leading = tensor.stride(-2) if tensor.shape[-2] > 1 else None
    return leading, tensor.stride(0) if tensor.dim() == 3 and tensor.shape[0] > 1 else None
