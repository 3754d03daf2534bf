"""Products of cuBLASLt on a GPU, each with a tuned algorithm or the library's first proposal.

An algorithm is looked up when its product is first prepared, never when it runs, so that runs can
be captured in a graph. Nothing here was ever run on a GPU.
"""

import contextlib
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lsq.gemm.configuration import CublasConfiguration, TileConfiguration
from lsq.gemm.lookup import Table
from lsq.gemm.product_key import ProductKey, key_of
from lsq.native.launch import Product
from lsq.native.products import DTYPES, Matmul, ProductLibrary, find_cublaslt

logger = logging.getLogger(__name__)

WORKSPACE_BYTES = 32 * 2**20
"""Default workspace of cuBLASLt."""
CANDIDATES = 16
"""Most proposals of the library that are looked at."""
INT8_MULTIPLES = {"k": 16, "leading_a": 16, "leading_b": 16, "n": 4, "leading_out": 4}
"""Sizes of an int8 product -> the number that they must be a multiple of."""


def check_key(key: ProductKey) -> None:
    """Raise ValueError if cuBLASLt does not support the layout of int8 operands."""
    if key.dtype != "int8":
        return
    if key.layout != "nt":
        raise ValueError(
            f'an int8 product takes a [M, K] and b [N, K], layout "nt", not {key.layout!r}: neither'
            " transposed; write the transpose first"
        )
    numbers = vars(key) | key.leading
    for name, multiple in INT8_MULTIPLES.items():
        if numbers[name] % multiple:
            wider = math.ceil(numbers[name] / multiple) * multiple
            raise ValueError(
                f"{name} of an int8 product is a multiple of {multiple}, not {numbers[name]}; pad"
                f" it to {wider}"
            )


@dataclass(frozen=True, kw_only=True)
class ChosenProduct:
    """A product that is ready to run."""

    key: ProductKey
    native: Matmul
    algorithm: CublasConfiguration

    def __str__(self) -> str:
        key = self.key
        return f"product {key.dtype} [{key.m}, {key.k}] x [{key.n}, {key.k}]"


Choose = Callable[["Products", ProductKey, list[CublasConfiguration]], CublasConfiguration]
"""Chooses a product's algorithm: one of the proposals, or another without a `fault`."""


def first_candidate(
    products: "Products", key: ProductKey, proposals: list[CublasConfiguration]
) -> CublasConfiguration:
    return proposals[0]


class Products:
    """The products of one device. `choose` gives each its algorithm when it is first needed.

    `current` makes the device's context current in this thread, as libcublasLt needs. `library`:
    its path; None: the installed one. `workspace_bytes`: most that an algorithm may need. Raises
    RuntimeError: the library is not found or cannot be loaded.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        current: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        library: str | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
        choose: Choose = first_candidate,
    ) -> None:
        self.device = device
        self.current = current
        self.library = ProductLibrary(library or find_cublaslt())
        self.workspace_bytes = workspace_bytes
        self._choose = choose
        self._chosen: dict[ProductKey, ChosenProduct] = {}
        self._lock = threading.Lock()

    def get(self, key: ProductKey) -> ChosenProduct:
        """Return the product of a key, always the same object. Raises ValueError: cuBLASLt has no
        such product; RuntimeError: it has no algorithm for it, or refuses the chosen one."""
        with self._lock:
            if key not in self._chosen:
                self._chosen[key] = self._create(key)
            return self._chosen[key]

    def prepare(self, product: Product) -> ChosenProduct:
        """Return the product of these tensors. Raises ValueError: they do not fit; else as
        `get`."""
        return self.get(key_of(product))

    def describe(self, key: ProductKey) -> Matmul:
        """Describe a product without an algorithm; the caller closes it. Raises ValueError:
        cuBLASLt has no such product; RuntimeError: the library refuses the description."""
        key = key.by_itself
        check_key(key)
        return self.library.product(
            m=key.m,
            n=key.n,
            k=key.k,
            dtype=DTYPES[key.dtypes["a"]],
            out_dtype=DTYPES[key.dtypes["out"]],
            transpose_a=int(key.layout[0] == "t"),
            transpose_b=int(key.layout[1] == "n"),
            **key.leading,
        )

    def candidates(self, key: ProductKey) -> list[CublasConfiguration]:
        """Return the library's proposals, best first, perhaps none. Raises as `describe`."""
        with contextlib.closing(self.describe(key)) as native:
            return self._candidates(native)

    def fault(self, key: ProductKey, algorithm: CublasConfiguration) -> str | None:
        """Say why an algorithm cannot run a product here in the workspace; None: it can."""
        try:
            with contextlib.closing(self.describe(key)) as native, self.current():
                needed = native.check(algorithm.algorithm).workspace_bytes
        except (RuntimeError, ValueError) as error:
            return str(error)
        if needed != algorithm.workspace_bytes:
            return (
                f"workspace_bytes is {algorithm.workspace_bytes} in the file, and its algorithm"
                f" needs {needed}"
            )
        if needed > self.workspace_bytes:
            return f"it needs a workspace of {needed} bytes, of {self.workspace_bytes} allowed"
        return None

    def close(self) -> None:
        with self._lock:
            for chosen in self._chosen.values():
                chosen.native.close()
            self._chosen.clear()
            self.library.close()

    def _create(self, key: ProductKey) -> ChosenProduct:
        native = self.describe(key)
        try:
            proposals = self._candidates(native)
            if not proposals:
                raise RuntimeError(
                    f"cuBLASLt has no algorithm for {key} within a workspace of"
                    f" {self.workspace_bytes} bytes; allow a larger workspace or other shapes"
                )
            wanted = self._choose(self, key, proposals)
            with self.current():
                native.choose(wanted.algorithm)
        except BaseException:
            native.close()
            raise
        return ChosenProduct(key=key, native=native, algorithm=wanted)

    def _candidates(self, native: Matmul) -> list[CublasConfiguration]:
        with self.current():
            proposals = native.candidates(self.workspace_bytes, CANDIDATES)
        return [
            CublasConfiguration(algorithm=a.data, workspace_bytes=a.workspace_bytes)
            for a in proposals
        ]


class TunedChoice:
    """Chooses algorithms from a table: the `choose` of Products. An algorithm serves its own shape
    alone. If the library refuses it, the first proposal runs, with one warning."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._warned = False

    def __call__(
        self, products: Products, key: ProductKey, proposals: list[CublasConfiguration]
    ) -> CublasConfiguration:
        """Return the algorithm for a product."""
        use = self.table.use(key)
        if (
            use.entry is None
            or use.entry.key != key
            or isinstance(use.entry.configuration, TileConfiguration)
        ):
            return first_candidate(products, key, proposals)
        fault = products.fault(key, use.entry.configuration)
        if fault is None:
            return use.entry.configuration
        if not self._warned:
            logger.warning(
                "the tuned algorithm of %s is not used: %s. cuBLASLt's own choice runs instead,"
                " here and wherever else that happens; `lsq configs verify` finds such entries,"
                " `lsq tune` replaces them.",
                key,
                fault,
            )
        self._warned = True
        use.entry = None
        return first_candidate(products, key, proposals)
