"""What is multiplied: the one description of a matrix product, without its tensors.

out [M, N] = alpha * a [M, K] times b [N, K] transposed. It is the key of tuned files and of
everything else that is remembered of a product; cuBLASLt's problem is made of its fields. Every
error of a key is a ValueError that begins with the name of the field.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from lsq.files.json_file import check_choice, check_whole
from lsq.native.launch import Product

LARGEST_DIMENSION = 2**31 - 1
LARGEST_INNER = (2**31 - 1) // torch.iinfo(torch.int8).max ** 2
"""Inner dimension up to which no int32 sum of products of codes can overflow: 133,144."""
INNER_STEP = 64
"""Parts of longer inner dimensions begin at its multiples."""

EXACT_TOKENS = 512
"""Up to so many tokens each number has its own entry; above, the next multiple of TOKEN_STEP stands
for it."""
TOKEN_STEP = 32

ADDRESS_MULTIPLE = 16
"""Bytes to whose multiples operands on a GPU are aligned."""

LAYOUTS = ("nt", "nn", "tt", "tn")
"""First letter: a lies as [M, K] ("n") or [K, M] ("t").

Second: b lies as [K, N] ("n") or [N, K] ("t").
"""
OUTS = {
    "int8": ("int32", "int8"),
    "bfloat16": ("bfloat16", "float32"),
    "float32": ("float32",),
}
"""dtype of the operands -> dtypes of the result."""
ALPHAS = ("one", "scalar", "vector")
"""What scales the result: nothing; a float; float32 [N] on the device, which is for int8 to int8.
"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What an operation multiplies, int8 to int32, and how it reads the sums."""

    layout: str
    """How its operands lie on the CPU; on a GPU both lie contiguous along K, some of them
    transposed first."""
    rows: int
    """Rows of sums that the CPU makes at a time unless tuned; 0: all at once."""
    by_columns: bool = False
    """Whether the CPU's tiles are read a block of columns at a time, which each thread packs for
    itself; else whole rows. Rows of a vocabulary are so long that few of them fit a cache.
    """
    tokens: str = "m"
    """The dimension that differs from batch to batch."""


REQUESTS = {
    "project": Request(layout="nt", rows=512),
    "project_input_gradient": Request(layout="nn", rows=512),
    "project_weight_gradient": Request(layout="tn", rows=4096, tokens="k"),
    "vocabulary_loss": Request(layout="nt", rows=256, by_columns=True),
    "vocabulary_loss_gradient": Request(layout="nt", rows=256, by_columns=True),
}
"""Who multiplies.

How it is done best depends on what reads the sums: each has entries of its own.
"""
TILED = ("project", "project_input_gradient", "project_weight_gradient")
"""Those whose products kernels of a GPU can end."""
TILED_ALONE = ("vocabulary_loss", "vocabulary_loss_gradient")
"""Those that kernels of a GPU always end: their sums are logits, which shall not exist.

They are not tuned there.
"""
MATMUL = Product.op
"""Any product by itself: those of floats, and whichever a GPU's kernels do not end."""
_BY_ITSELF = Request(layout="nt", rows=0)


@dataclass(frozen=True, kw_only=True)
class ProductKey:
    """What is multiplied. An operation says all but m, n and k by its name.

    Raises:
        ValueError: there is no such product.
    """

    op: str = MATMUL
    """One of REQUESTS, or MATMUL."""
    m: int
    n: int
    k: int
    dtype: str = "int8"
    """Of a and b."""
    out: str = "int32"
    alpha: str = "one"
    layout: str | None = None
    """One of LAYOUTS; by default the operation's."""
    leading_a: int | None = None
    """Elements from one row of a, as it lies, to the next; None: the rows are packed."""
    leading_b: int | None = None
    leading_out: int | None = None

    def __post_init__(self) -> None:
        check_choice("op", self.op, (*REQUESTS, MATMUL))
        for name in ("m", "n", "k"):
            check_whole(name, getattr(self, name), 1, LARGEST_DIMENSION)
        check_choice("dtype", self.dtype, OUTS)
        check_choice("out", self.out, OUTS[self.dtype])
        alphas = (
            ("one",) if self.out == "int32" else ALPHAS if self.out == "int8" else ("one", "scalar")
        )
        check_choice("alpha", self.alpha, alphas)
        if self.layout is None:
            object.__setattr__(self, "layout", self.request.layout)
        check_choice("layout", self.layout, LAYOUTS)
        if self.dtype == "int8":
            check_whole("k", self.k, 1, LARGEST_INNER)
        self._check_places()
        given = [name for name in self.fields() if name not in ("op", "m", "n", "k")]
        if given and self.op != MATMUL:
            raise ValueError(
                f"{given[0]} is {getattr(self, given[0])!r}; {self.op} says that itself: leave it"
                " out"
            )

    def _check_places(self) -> None:
        places = self.places
        for name, (_, columns) in self.matrices.items():
            leading = f"leading_{name}"
            check_whole(leading, places[leading], columns, LARGEST_DIMENSION)
            if places[leading] == columns:
                object.__setattr__(self, leading, None)

    @property
    def by_itself(self) -> "ProductKey":
        """The product that a library of a GPU multiplies for it: an operation's, with packed
        operands along K."""
        return self if self.op == MATMUL else ProductKey(m=self.m, n=self.n, k=self.k)

    @property
    def request(self) -> Request:
        """What its operation says of it."""
        return REQUESTS.get(self.op, _BY_ITSELF)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of a, b and out as they lie."""
        a, b = (self.m, self.k), (self.n, self.k)
        a, b = a[::-1] if self.layout[0] == "t" else a, b[::-1] if self.layout[1] == "n" else b
        return {"a": a, "b": b, "out": (self.m, self.n)}

    @property
    def places(self) -> dict[str, int]:
        """leading_a to leading_out, with those of packed matrices filled in."""
        packed = {f"leading_{name}": columns for name, (_, columns) in self.matrices.items()}
        return packed | {name: vars(self)[name] for name in packed if vars(self)[name] is not None}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Of a, b and out."""
        return {
            name: getattr(torch, self.out if name == "out" else self.dtype)
            for name in ("a", "b", "out")
        }

    @property
    def lengths(self) -> dict[str, int]:
        """Elements from the first to the last of a, b and out."""
        places = self.places
        return {
            name: (rows - 1) * places[f"leading_{name}"] + columns
            for name, (rows, columns) in self.matrices.items()
        }

    @property
    def bytes(self) -> int:
        """Of all three."""
        return sum(length * self.dtypes[name].itemsize for name, length in self.lengths.items())

    def fields(self) -> dict[str, Any]:
        """The fields that say something: m, n, k and whatever is not as by default."""
        usual = {field.name: field.default for field in dataclasses.fields(self)} | {
            "layout": self.request.layout
        }
        return {name: value for name, value in vars(self).items() if value != usual[name]}

    @property
    def tokens(self) -> int:
        """The dimension that differs from batch to batch: k of weight gradients, else m."""
        return getattr(self, self.request.tokens)

    def with_tokens(self, tokens: int) -> "ProductKey":
        """This product in a batch of another size."""
        return dataclasses.replace(self, **{self.request.tokens: tokens})

    def rounded(self) -> "ProductKey":
        """The key that stands for this one in files; a product by itself stands for itself
        alone."""
        tokens = rounded_tokens(self.tokens)
        if self.request.tokens == "k":
            tokens = min(tokens, LARGEST_INNER)
        return self if tokens == self.tokens or self.op == MATMUL else self.with_tokens(tokens)

    @property
    def family(self) -> tuple:
        """The same for all batch sizes."""
        return tuple(value for name, value in vars(self).items() if name != self.request.tokens)

    @property
    def arithmetic(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        rest = [self.layout, *([] if self.alpha == "one" else [f"alpha {self.alpha}"])]
        rest += [f"{name} {value}" for name, value in self.fields().items() if name in self.places]
        return (
            f"{self.op} {self.m} x {self.n} x {self.k} ({self.dtype} to {self.out},"
            f" {', '.join(rest)})"
        )


def is_long(op: str, k: int) -> bool:
    """Whether the sums of an operation of TILED are made in parts, each of which an int32 has room
    for."""
    return op in TILED and k > LARGEST_INNER


def inner_parts(k: int) -> list[slice]:
    """Parts of an inner dimension, as equal as multiples of INNER_STEP allow; their int32 sums
    cannot overflow.

    Sums of all of K are float32: the int32 sums of the parts, converted and added in this order.
    """
    if k <= LARGEST_INNER:
        return [slice(0, k)]
    count = -(-k // (LARGEST_INNER // INNER_STEP * INNER_STEP))
    size = -(-k // (count * INNER_STEP)) * INNER_STEP
    return [slice(first, min(first + size, k)) for first in range(0, k, size)]


def rounded_tokens(tokens: int) -> int:
    """The number of tokens whose entry serves this one of an operation."""
    if tokens <= EXACT_TOKENS:
        return tokens
    return min(-(-tokens // TOKEN_STEP) * TOKEN_STEP, LARGEST_DIMENSION)


def key_of(product: Product) -> ProductKey:
    """The key of a product of tensors, which may be on "meta".

    a [M, K] or [K, M] transposed, b [N, K] or [K, N] transposed, out [M, N]; rows contiguous. alpha
    is a float or float32 [N]. For an operation all are packed, as `ProductKey.by_itself` says.
    Where the tensors lie is checked by the list that runs them (lsq.native.launch_list).

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    a, b, alpha = product.a, product.b, product.alpha
    tensors = {"a": a, "b": b, "out": product.out}
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    if any(tensor.dim() != 2 for tensor in tensors.values()):
        raise ValueError(f"the tensors of a product are matrices, not {shapes}")
    m, k = reversed(a.shape) if product.transpose_a else a.shape
    n, inner = reversed(b.shape) if product.transpose_b else b.shape
    if inner != k or product.out.shape != (m, n):
        raise ValueError(
            f"{shapes} do not fit: out [M, N] of a {'[K, M]' if product.transpose_a else '[M, K]'} "
            f"and b {'[K, N]' if product.transpose_b else '[N, K]'}"
        )
    if a.dtype != b.dtype:
        raise ValueError(f"a is {a.dtype} and b is {b.dtype}; convert one of them")
    places = {f"leading_{name}": _leading(name, tensor) for name, tensor in tensors.items()}
    vector = isinstance(alpha, torch.Tensor)
    if vector:
        if alpha.dtype != torch.float32 or alpha.shape != (n,) or not alpha.is_contiguous():
            raise ValueError(
                f"alpha is contiguous float32 [{n}], not {alpha.dtype} {list(alpha.shape)}"
            )
    found = ProductKey(
        m=m,
        n=n,
        k=k,
        dtype=_name(a.dtype),
        out=_name(product.out.dtype),
        alpha="vector" if vector else "one" if alpha == 1 else "scalar",
        layout=("t" if product.transpose_a else "n") + ("n" if product.transpose_b else "t"),
        **places,
    )
    if product.op == MATMUL:
        return found
    asked = ProductKey(op=product.op, m=m, n=n, k=k)
    if asked.by_itself != found:
        raise ValueError(f"{product.op} multiplies {asked.by_itself} on a GPU, not {found}")
    return asked


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _leading(name: str, tensor: torch.Tensor) -> int | None:
    """Elements from one row to the next; None where there is a single one."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"the rows of {name} are contiguous, not strided by {tensor.stride(-1)}; copy it first"
        )
    return tensor.stride(0) if tensor.shape[0] > 1 else None
