"""Products of cuBLASLt for the tuner: operands on a GPU, exact checks, and times by CUDA events.

On the CPU, with the emulated library, the same code runs and times mean nothing.
"""

import contextlib
import time
from collections.abc import Callable, Sequence

import torch

from lsq.csrc.launch_list import aligned_workspace
from lsq.csrc.products import MatrixProduct, ProductError
from lsq.gemm.configuration import CublasConfiguration
from lsq.gemm.cublaslt import Products
from lsq.gemm.product_key import ProductKey
from lsq.gemm.product_spec import ProductSpec
from lsq.gemm.tuned_cublaslt import spec_of
from lsq.tune import algorithms
from lsq.tune.checksum import RowChecksums

HEAD_START = 20_000
"""Cycles that the GPU waits for each product of a measurement: the CPU queues them all before the first runs."""
MOST_REPEATS = 400
MOST_SETS = 128
MOST_BYTES = 2**33
REFERENCE_ELEMENTS = 2**24
"""Of a result that are computed in float64 at a time."""


class CublasBackend:
    """The products of one GPU.

    Args:
        products: of the device; their workspace is the most that algorithms may take.
        exhaustive: try every algorithm instead of those that the library proposes.
        cache: bytes that the operands of a product exceed together; by default the device's L2 cache.
    """

    def __init__(self, products: Products, *, exhaustive: bool = False, cache: int | None = None) -> None:
        self.products = products
        self.exhaustive = exhaustive
        self.on_gpu = products.device.type == "cuda"
        self.workspace = aligned_workspace(products.workspace_bytes, products.device)
        if cache is None:
            cache = torch.cuda.get_device_properties(products.device).L2_cache_size if self.on_gpu else 2**20
        self.cache = cache

    def candidates(self, key: ProductKey) -> Sequence[CublasConfiguration]:
        search = algorithms.all_algorithms if self.exhaustive else algorithms.proposed
        with self.current():
            return search(self.products, spec_of(key))

    def trial(self, key: ProductKey) -> "CublasTrial":
        return CublasTrial(self, key)

    def current(self) -> contextlib.AbstractContextManager:
        """Make the device's context current, which cuBLASLt needs."""
        return torch.cuda.device(self.products.device) if self.on_gpu else contextlib.nullcontext()

    def time(self, run: Callable[[int], None], repeats: int) -> float:
        """Seconds per run, by the device's clock. `run` gets the number of the run."""
        repeats = min(repeats, MOST_REPEATS)
        if not self.on_gpu:
            start = time.perf_counter()
            for number in range(repeats):
                run(number)
            return (time.perf_counter() - start) / repeats
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START * repeats)
        begin.record()
        for number in range(repeats):
            run(number)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / repeats


class _Operands:
    """A product in the library with sets of operands, a, b and out each, that are used in turn."""

    def __init__(self, backend: CublasBackend, spec: ProductSpec) -> None:
        self.backend, self.spec = backend, spec
        place = backend.products.device
        generator = torch.Generator().manual_seed(0)
        a_shape = (spec.k, spec.m) if spec.transpose_a else (spec.m, spec.k)
        b_shape = (spec.k, spec.n) if spec.transpose_b else (spec.n, spec.k)
        a, b = (_whole_numbers(shape, spec.dtype, generator).to(place) for shape in (a_shape, b_shape))
        size = a.nbytes + b.nbytes + spec.m * spec.n * spec.out_dtype.itemsize
        count = max(1, min(2 * backend.cache // size + 1, MOST_SETS, MOST_BYTES // size))
        out = torch.zeros(spec.m, spec.n, dtype=spec.out_dtype, device=place)
        self.sets = [(a, b, out), *((a.clone(), b.clone(), out.clone()) for _ in range(count - 1))]
        typical = 40 / (spec.k**0.5 * 127**2 / 3)  # of codes: results fill the range of int8, and some leave it
        self.vector = typical * (0.5 + 2 * torch.rand(spec.n, generator=generator)).to(place)
        self.alpha = {"one": None, "scalar": typical, "vector": self.vector.data_ptr()}[spec.alpha]
        self.native: MatrixProduct = backend.products.describe(spec)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """a [M, K], b [N, K], out [M, N] of the first set."""
        a, b, out = self.sets[0]
        return a.t() if self.spec.transpose_a else a, b.t() if self.spec.transpose_b else b, out

    def choose(self, data: bytes) -> None:
        with self.backend.current():
            self.native.choose(data)

    def run(self, number: int) -> None:
        """Queue the product of one set."""
        stream = torch.cuda.current_stream(self.backend.products.device).cuda_stream if self.backend.on_gpu else 0
        self.native.run(
            [tensor.data_ptr() for tensor in self.sets[number % len(self.sets)]],
            alpha=self.alpha,
            workspace=self.backend.workspace.data_ptr(),
            workspace_bytes=self.backend.workspace.nbytes,
            stream=stream,
        )


class CublasTrial:
    """One product on the GPU, and beside an int8 product the one of bfloat16 that it stands for.

    Operands are whole numbers, of floats too, and so small that every sum is exact in float32: the result is right, or
    rounded once as it should be, or the algorithm is refused.
    """

    def __init__(self, backend: CublasBackend, key: ProductKey) -> None:
        self.backend = backend
        with backend.current():
            self._own = _Operands(backend, spec_of(key))
            self._floats: _Operands | None = None
            a, b, _ = self._own.operands()
            whole = self._own.spec.out_dtype == torch.int32
            self._checksums = RowChecksums(a, b) if whole else None
            self._expected = None if whole else self._exact(a, b)

    def fault(self, configuration: CublasConfiguration) -> str | None:
        out = self._own.sets[0][2]
        try:
            with self.backend.current():
                self._own.choose(configuration.algorithm)
                out.zero_()
                self._own.run(0)
        except ProductError as error:
            return str(error)
        if self._checksums is not None:
            wrong = self._checksums.first_wrong_row(out)
            return None if wrong is None else f"row {wrong} of the result is wrong"
        differing = int((out != self._expected).sum())
        return f"{differing} of {out.numel()} results are wrong" if differing else None

    def seconds(self, configuration: CublasConfiguration, repeats: int) -> float:
        with self.backend.current():
            self._own.choose(configuration.algorithm)
            return self.backend.time(self._own.run, repeats)

    def float_seconds(self, repeats: int) -> float:
        """Of bfloat16 as the library proposes it; of other floats themselves."""
        with self.backend.current():
            if self._floats is None:
                own = self._own.spec
                dtype = torch.bfloat16 if own.dtype == torch.int8 else own.dtype
                spec = ProductSpec(
                    m=own.m, n=own.n, k=own.k, dtype=dtype, out_dtype=dtype, transpose_a=own.transpose_a,
                    transpose_b=own.transpose_b,
                )
                self._floats = _Operands(self.backend, spec)
                self._floats.choose(algorithms.proposed(self.backend.products, spec)[0].algorithm)
            return self.backend.time(self._floats.run, repeats)

    def close(self) -> None:
        """Free both products; queued runs are waited for."""
        if self.backend.on_gpu:
            torch.cuda.synchronize(self.backend.products.device)
        for operands in (self._own, self._floats):
            if operands is not None:
                operands.native.close()

    def _exact(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The result [M, N] of the first set, rounded once."""
        spec = self._own.spec
        alpha = self._own.vector if spec.alpha == "vector" else self._own.alpha or 1.0
        wide = b.double().t()
        parts = []
        for block in a.split(max(1, REFERENCE_ELEMENTS // spec.n)):
            scaled = (block.double() @ wide).float() * alpha
            if spec.out_dtype == torch.int8:
                scaled = scaled.round().clamp(-128, 127)
            parts.append(scaled.to(spec.out_dtype))
        return torch.cat(parts)


def _whole_numbers(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Codes, the largest in the first row and column; for floats from -7 to 7."""
    largest = 127 if dtype == torch.int8 else 7
    made = torch.randint(-largest, largest + 1, shape, dtype=torch.int8, generator=generator)
    made[0], made[:, 0] = largest, -largest
    return made.to(dtype)
