"""What is multiplied: the keys of tuned products.

out [M, N] = a [M, K] times b [N, K] transposed. Every error is a ValueError that begins with the name of the field.
"""

import dataclasses
from dataclasses import dataclass

from lsq.gemm.checks import check_choice, check_whole
from lsq.gemm.product import LARGEST_INNER

LARGEST_DIMENSION = 2**31 - 1

EXACT_TOKENS = 512
"""Up to so many tokens each number has its own entry; above, the next multiple of TOKEN_STEP stands for it."""
TOKEN_STEP = 32

LAYOUTS = ("nt", "nn", "tt", "tn")
"""First letter: a lies as [M, K] ("n") or [K, M] ("t"). Second: b lies as [K, N] ("n") or [N, K] ("t")."""
OUTS = {
    "int8": ("int32", "int8"),
    "bfloat16": ("bfloat16", "float32"),
    "float16": ("float16", "float32"),
    "float32": ("float32",),
}
"""dtype of the operands -> dtypes of the result."""
ALPHAS = ("one", "scalar", "vector")
"""What scales the result, as in ProductSpec; "vector" is for int8 to int8."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What an operation of lsq/ops multiplies."""

    out: str
    alpha: str
    layout: str
    """How its operands lie on the CPU. A GPU multiplies int8 as "nt" alone."""
    rows: int
    """Rows of sums that the CPU makes at a time unless tuned; 0: all at once."""
    in_place: bool = False
    """The sums are the operation's output, so that they need no scratch memory."""
    tokens: str = "m"
    """The dimension that differs from batch to batch."""


OPERATIONS = {
    "linear_int8": Operation(out="int8", alpha="vector", layout="nt", rows=512),
    "linear_int32": Operation(out="int32", alpha="one", layout="nt", rows=0, in_place=True),
    "linear_input_gradient": Operation(out="int32", alpha="one", layout="nn", rows=512),
    "linear_weight_gradient": Operation(out="int32", alpha="one", layout="tn", rows=4096, tokens="k"),
    "vocabulary_cross_entropy": Operation(out="int32", alpha="one", layout="nt", rows=256),
    "matmul": Operation(out="int32", alpha="one", layout="nt", rows=0, in_place=True),
}
"""The products that can be tuned; "matmul" is any product by itself."""


@dataclass(frozen=True, kw_only=True)
class ProductKey:
    """What is multiplied.

    Raises:
        ValueError: there is no such product.
    """

    op: str
    """One of OPERATIONS."""
    m: int
    n: int
    k: int
    dtype: str = "int8"
    """Of a and b."""
    out: str = "int32"
    alpha: str = "one"
    layout: str = "nt"

    def __post_init__(self) -> None:
        check_choice("op", self.op, OPERATIONS)
        for name in ("m", "n", "k"):
            check_whole(name, getattr(self, name), 1, LARGEST_DIMENSION)
        check_choice("dtype", self.dtype, OUTS)
        check_choice("out", self.out, OUTS[self.dtype])
        alphas = ("one",) if self.out == "int32" else ALPHAS if self.out == "int8" else ("one", "scalar")
        check_choice("alpha", self.alpha, alphas)
        check_choice("layout", self.layout, LAYOUTS)
        if self.dtype == "int8":
            check_whole("k", self.k, 1, LARGEST_INNER)
        elif self.op != "matmul":
            raise ValueError(f'dtype is {self.dtype!r}; {self.op} multiplies int8 (op "matmul" takes floats)')

    @classmethod
    def of(cls, op: str, m: int, n: int, k: int, layout: str | None = None) -> "ProductKey":
        """The int8 product of an operation on the CPU, whose layout is the operation's own unless given.

        Raises:
            ValueError: there is no such product.
        """
        check_choice("op", op, OPERATIONS)
        operation = OPERATIONS[op]
        layout = operation.layout if layout is None else layout
        return cls(op=op, m=m, n=n, k=k, out=operation.out, alpha=operation.alpha, layout=layout)

    @property
    def tokens(self) -> int:
        """The dimension that differs from batch to batch: k of weight gradients, else m."""
        return getattr(self, OPERATIONS[self.op].tokens)

    def with_tokens(self, tokens: int) -> "ProductKey":
        """This product in a batch of another size."""
        return dataclasses.replace(self, **{OPERATIONS[self.op].tokens: tokens})

    def rounded(self) -> "ProductKey":
        """The key that stands for this one in files."""
        tokens = rounded_tokens(self.tokens)
        if self.op == "linear_weight_gradient":
            tokens = min(tokens, LARGEST_INNER)
        return self if tokens == self.tokens else self.with_tokens(tokens)

    @property
    def family(self) -> tuple:
        """The same for all batch sizes."""
        fixed = "m" if OPERATIONS[self.op].tokens == "k" else "k"
        return self.op, getattr(self, fixed), self.n, self.dtype, self.out, self.alpha, self.layout

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        alpha = "" if self.alpha == "one" else f", alpha {self.alpha}"
        return f"{self.op} {self.m} x {self.n} x {self.k} ({self.dtype} to {self.out}, {self.layout}{alpha})"


def rounded_tokens(tokens: int) -> int:
    """The number of tokens whose entry serves this one."""
    if tokens <= EXACT_TOKENS:
        return tokens
    return min(-(-tokens // TOKEN_STEP) * TOKEN_STEP, LARGEST_DIMENSION)
