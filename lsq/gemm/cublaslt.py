"""Matrix products on a GPU: the algorithm of cuBLASLt that each runs with.

Algorithms are looked up when a product is first asked for, never when it runs, so that runs may be captured in a graph.
Nothing here was ever run on a GPU.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from lsq.csrc.find import find_cublaslt
from lsq.csrc.products import ALPHAS, DTYPES, Candidate, MatrixProduct, ProductLibrary
from lsq.gemm.product_spec import Operands, ProductSpec, spec_for

__all__ = [
    "WORKSPACE_BYTES",
    "Algorithm",
    "ChosenProduct",
    "Operands",
    "ProductSpec",
    "Products",
    "first_candidate",
    "spec_for",
]

WORKSPACE_BYTES = 32 * 2**20
"""What cuBLASLt may use as workspace, unless said otherwise."""

CANDIDATES = 16
"""How many proposals of the library are looked at."""

_NUMBERS = ("m", "n", "k", "transpose_a", "transpose_b", "batch")
_NUMBERS += ("leading_a", "leading_b", "leading_out", "stride_a", "stride_b", "stride_out")


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """How cuBLASLt runs a product. The fields after `waves` are what the bytes hold, in cuBLASLt's own numbers."""

    data: bytes
    """64 bytes, valid for one version of the library and one model of device."""
    workspace_bytes: int
    waves: float
    """How often the product's blocks fill the device."""
    id: int
    tile: int
    stages: int
    split_k: int
    reduction_scheme: int
    swizzle: int
    custom_option: int
    inner_shape: int
    cluster_shape: int


@dataclass(frozen=True, kw_only=True)
class ChosenProduct:
    """A product that is ready to run."""

    spec: ProductSpec
    native: MatrixProduct
    algorithm: Algorithm

    @property
    def address(self) -> int:
        """What the launcher runs."""
        return self.native.address

    @property
    def workspace_bytes(self) -> int:
        """The smallest workspace to run it with."""
        return self.algorithm.workspace_bytes

    def __str__(self) -> str:
        spec = self.spec
        batch = f"{spec.batch} times " if spec.batch > 1 else ""
        return f"product {spec.dtype} {batch}[{spec.m}, {spec.k}] x [{spec.n}, {spec.k}]"


def first_candidate(spec: ProductSpec, candidates: list[Algorithm]) -> Algorithm:
    """The proposal that the library thinks best."""
    return candidates[0]


class Products:
    """The products of one device, each described and given its algorithm when it is first asked for.

    Args:
        device: where the tensors lie.
        library: path of libcublasLt, by default the one that is installed; of the emulated one to run on the CPU.
        workspace_bytes: the largest workspace that algorithms may need.
        choose: picks the algorithm of a product, among the library's proposals or from elsewhere.

    Raises:
        RuntimeError: the library is not found or cannot be loaded.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        library: str | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
        choose: Callable[[ProductSpec, list[Algorithm]], Algorithm] = first_candidate,
    ) -> None:
        self.device = device
        self.library = ProductLibrary(library or find_cublaslt())
        self.workspace_bytes = workspace_bytes
        self._choose = choose
        self._chosen: dict[ProductSpec, ChosenProduct] = {}
        self._lock = threading.Lock()

    def get(self, spec: ProductSpec) -> ChosenProduct:
        """The product of a spec, with its algorithm; the same object every time.

        Raises:
            RuntimeError: cuBLASLt has no algorithm for it, or not within the workspace, or refuses the chosen one.
        """
        with self._lock:
            if spec not in self._chosen:
                self._chosen[spec] = self._create(spec)
            return self._chosen[spec]

    def prepare(self, product: Operands) -> ChosenProduct:
        """The product of these tensors, with its algorithm.

        Raises:
            ValueError: the tensors do not fit, or lie on another device.
            RuntimeError: as `get`.
        """
        if product.out.device != self.device:
            raise ValueError(f"the tensors lie on {product.out.device}, these products run on {self.device}")
        return self.get(spec_for(product))

    def run(self, product: Operands, workspace: torch.Tensor, stream: int = 0) -> None:
        """Queue one product by itself.

        Args:
            product: its tensors.
            workspace: uint8 on the device, at least as long as the algorithm needs, from a multiple of 256 bytes on.
            stream: a cudaStream_t.

        Raises:
            ValueError: the tensors do not fit.
            RuntimeError: cuBLASLt refuses it; the message says why, with the shapes.
        """
        chosen = self.prepare(product)
        kind, alpha = chosen.spec.alpha, product.alpha
        number = None if kind == "one" else alpha.data_ptr() if kind == "vector" else float(alpha)
        with self._current():
            chosen.native.run(
                [product.a.data_ptr(), product.b.data_ptr(), product.out.data_ptr()],
                alpha=number,
                workspace=workspace.data_ptr(),
                workspace_bytes=workspace.nbytes,
                stream=stream,
            )

    def candidates(self, spec: ProductSpec) -> list[Algorithm]:
        """What the library proposes for a spec, best first.

        Raises:
            RuntimeError: it has no such product.
        """
        native = self.describe(spec)
        try:
            return self._candidates(native)
        finally:
            native.close()

    def describe(self, spec: ProductSpec) -> MatrixProduct:
        """A product without an algorithm, for a search over all of them; the caller closes it.

        Raises:
            RuntimeError: the library refuses the description.
        """
        numbers = {name: int(getattr(spec, name)) for name in _NUMBERS}
        numbers |= {"dtype": DTYPES[spec.dtype], "out_dtype": DTYPES[spec.out_dtype], "alpha": ALPHAS[spec.alpha]}
        return self.library.product(**numbers)

    def check(self, spec: ProductSpec, data: bytes) -> Algorithm:
        """The algorithm that these bytes hold, if it runs a product here.

        Raises:
            ValueError: not 64 bytes.
            RuntimeError: it does not; the message says why.
        """
        native = self.describe(spec)
        try:
            with self._current():
                return self.algorithm(native.check(data))
        finally:
            native.close()

    def algorithm(self, candidate: Candidate) -> Algorithm:
        """The algorithm that a candidate's bytes hold.

        Raises:
            ValueError: not 64 bytes.
            RuntimeError: not an algorithm.
        """
        return Algorithm(**candidate._asdict(), **self.library.decode(candidate.data))

    def close(self) -> None:
        """Free every product; none may be run or captured any more."""
        with self._lock:
            for chosen in self._chosen.values():
                chosen.native.close()
            self._chosen.clear()
            self.library.close()

    def _create(self, spec: ProductSpec) -> ChosenProduct:
        native = self.describe(spec)
        try:
            found = self._candidates(native)
            if not found:
                raise RuntimeError(
                    f"cuBLASLt has no algorithm for {spec} within a workspace of {self.workspace_bytes} bytes; "
                    "allow a larger workspace or other shapes"
                )
            wanted = self._choose(spec, found)
            with self._current():
                algorithm = self.algorithm(native.check(wanted.data))
                if algorithm.workspace_bytes > self.workspace_bytes:
                    raise RuntimeError(
                        f"the algorithm chosen for {spec} needs a workspace of {algorithm.workspace_bytes} bytes, and "
                        f"only {self.workspace_bytes} are allowed; choose another or allow more"
                    )
                native.choose(wanted.data)
        except BaseException:
            native.close()
            raise
        return ChosenProduct(spec=spec, native=native, algorithm=algorithm)

    def _candidates(self, native: MatrixProduct) -> list[Algorithm]:
        with self._current():
            return [self.algorithm(found) for found in native.candidates(self.workspace_bytes, CANDIDATES)]

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make the device's context current, which cuBLASLt needs."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            yield
