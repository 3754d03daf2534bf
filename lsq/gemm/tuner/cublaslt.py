"""Trials of cuBLASLt's products: algorithms, operands on a GPU, exact checks, and times by CUDA
events.

On the CPU, with the emulated library, the same code runs and times mean nothing.

int32 sums are checked without a second product. Each row of the sums is multiplied by a random
vector r, modulo 2^64: out r = a (b^T r) holds for every r if out is right. A row with a wrong sum
passes for at most one in 2^32 vectors, since the difference of two int32 numbers is no multiple of
a higher power of two. The check takes M * N operations, the product M * N * K.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

import torch

from lsq.gemm.configuration import CublasConfiguration
from lsq.gemm.cublaslt import Products
from lsq.gemm.product_key import MATMUL, ProductKey
from lsq.gemm.tuner.ended import EndedTrial, Operations
from lsq.native.device import Device, aligned_workspace
from lsq.native.products import Matmul, ProductError

MOST_REPEATS = 400
MOST_SETS = 128
MOST_BYTES = 2**33
REFERENCE_ELEMENTS = 2**24
"""Results that are computed in float64 at a time."""
LARGEST = torch.iinfo(torch.int8).max
"""Largest code of operands."""
_ELEMENTS = 2**18
"""Numbers that are widened to int64 at a time, so that they stay in the cache."""
LARGEST_FACTOR = 7
"""Largest value of float operands: float32 holds every sum exactly."""


class CublasBackend:
    """The products of one GPU.

    Args:
        products: products of the device; their workspace is the most that an algorithm may take.
        device: runs the kernels of epilogues; None: products are tried without epilogues.
        operations: representative operations, whose products are tried with their epilogues.
        cache: bytes that all sets of operands together exceed; None: the size of the L2 cache.
    """

    def __init__(
        self,
        products: Products,
        *,
        device: Device | None = None,
        operations: Operations | None = None,
        cache: int | None = None,
    ) -> None:
        self.products = products
        self.device, self.operations = device, operations or {}
        self.on_gpu = products.device.type == "cuda"
        self.workspace = aligned_workspace(products.workspace_bytes, products.device)
        if cache is None:
            cache = (
                torch.cuda.get_device_properties(products.device).L2_cache_size
                if self.on_gpu
                else 2**20
            )
        self.cache = cache

    def candidates(self, key: ProductKey) -> Sequence[CublasConfiguration]:
        """Return the library's proposals. Raises ValueError: cuBLASLt has no such product;
        RuntimeError: it has no algorithm for it."""
        proposals = self.products.candidates(key)
        if not proposals:
            raise RuntimeError(
                f"cuBLASLt has no algorithm for {key} in {self.products.workspace_bytes} bytes"
            )
        return proposals

    def copies(self, key: ProductKey) -> int:
        return max(1, min(2 * self.cache // key.bytes + 1, MOST_SETS, MOST_BYTES // key.bytes))

    @property
    def sm(self) -> int | None:
        """Compute capability, e.g. 90; None in the emulator."""
        if not self.on_gpu:
            return None
        major, minor = torch.cuda.get_device_capability(self.products.device)
        return 10 * major + minor

    def trial(self, key: ProductKey) -> "CublasTrial | EndedTrial":
        """Return the trial of a product, with the epilogue of its operation if it has one. Raises
        ValueError, RuntimeError: there is no such product."""
        if key.op == MATMUL or self.device is None:
            return CublasTrial(self, key)
        return EndedTrial(key, self.device, self.operations, CublasTrial(self, key))

    def time(self, run: Callable[[int], None], repeats: int) -> float:
        """Return the seconds of a run by the device's clock; `run` takes the number of the run."""
        repeats = min(repeats, MOST_REPEATS)
        if not self.on_gpu:
            start = time.perf_counter()
            for number in range(repeats):
                run(number)
            return (time.perf_counter() - start) / repeats
        run(0)  # kernels are loaded now, since they cannot be in a capture
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream, graph = torch.cuda.Stream(self.products.device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self.products.device))
        in_turn = (
            contextlib.nullcontext() if self.device is None else self.device.captures_in_turn()
        )
        with in_turn, torch.cuda.stream(stream):
            graph.capture_begin()  # else Python would take longer than a small product
            try:
                for number in range(repeats):
                    run(number)
            finally:
                graph.capture_end()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / repeats


class _Operands:
    """A product in the library, with several sets of operands (a, b, out) that are used in turn."""

    def __init__(self, backend: CublasBackend, key: ProductKey) -> None:
        self.backend, self.key = backend, key
        place = backend.products.device
        generator = torch.Generator().manual_seed(0)
        count = backend.copies(key)
        largest = LARGEST if key.dtype == "int8" else LARGEST_FACTOR
        flat = {name: whole_numbers(key, name, largest, generator) for name in ("a", "b")}
        flat["out"] = torch.zeros(key.lengths["out"], dtype=torch.int8)
        flat = {name: elements.to(place, key.dtypes[name]) for name, elements in flat.items()}
        self.sets = [
            {name: laid(elements.clone(), key, name) for name, elements in flat.items()}
            for _ in range(count)
        ]
        self.native: Matmul = backend.products.describe(key)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a [M, K], b [N, K] and out [M, N] of the first set."""
        a, b, out = self.sets[0].values()
        return (
            a.mT if self.key.layout[0] == "t" else a,
            b.mT if self.key.layout[1] == "n" else b,
            out,
        )

    def run(self, number: int) -> None:
        backend = self.backend
        self.native.run(
            [tensor.data_ptr() for tensor in self.sets[number % len(self.sets)].values()],
            workspace=backend.workspace.data_ptr(),
            workspace_bytes=backend.workspace.nbytes,
            stream=torch.cuda.current_stream(backend.products.device).cuda_stream
            if backend.on_gpu
            else 0,
        )


class CublasTrial:
    """A product without an epilogue, and for comparison with int8 the same product in bfloat16.

    Operands are whole numbers, also as floats, so small that float32 holds every sum exactly. An
    algorithm is refused unless its results are exact, or for floats exact and then rounded once.
    """

    def __init__(self, backend: CublasBackend, key: ProductKey) -> None:
        self.backend, key = backend, key.by_itself
        self._own = _Operands(backend, key)
        self._floats: _Operands | None = None
        a, b, _ = self._own.operands()
        sums = key.out == "int32"
        self._checksums = RowChecksums(a, b) if sums else None
        self._expected = None if sums else self._exact(a, b)

    def candidates(self) -> Sequence[CublasConfiguration]:
        return self.backend.candidates(self._own.key)

    def fault(self, configuration: CublasConfiguration) -> str | None:
        *_, out = self._own.operands()
        fault = self.backend.products.fault(self._own.key, configuration)
        if fault is not None:
            return fault
        try:
            with self.backend.products.current():
                self._own.native.choose(configuration.algorithm)
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
        with self.backend.products.current():
            self._own.native.choose(configuration.algorithm)
            return self.backend.time(self._own.run, repeats)

    def float_seconds(self, repeats: int) -> float:
        """Return the seconds in bfloat16 (or a float product's own dtype) by the first proposal."""
        with self.backend.products.current():
            if self._floats is None:
                own = self._own.key
                dtype = "bfloat16" if own.dtype == "int8" else own.dtype
                key = dataclasses.replace(own, dtype=dtype, out=dtype)
                self._floats = _Operands(self.backend, key)
                self._floats.native.choose(self.backend.products.candidates(key)[0].algorithm)
            return self.backend.time(self._floats.run, repeats)

    def close(self) -> None:
        if self.backend.on_gpu:
            torch.cuda.synchronize(self.backend.products.device)
        for operands in (self._own, self._floats):
            if operands is not None:
                operands.native.close()

    def _exact(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the result [M, N] of the first set, rounded once."""
        key = self._own.key
        wide, dtype = b.double().mT, getattr(torch, key.out)
        blocks = a.split(max(1, REFERENCE_ELEMENTS // key.n))
        return torch.cat([(block.double() @ wide).to(dtype) for block in blocks])


def whole_numbers(
    key: ProductKey, name: str, largest: int, generator: torch.Generator
) -> torch.Tensor:
    """Return int8 [length] of operand "a" or "b": random values up to `largest`. The first row is
    `largest` and the first column -`largest`, so that narrow instructions saturate."""
    values = torch.randint(
        -largest, largest + 1, (key.lengths[name],), dtype=torch.int8, generator=generator
    )
    matrix = laid(values, key, name)
    matrix[0], matrix[:, 0] = largest, -largest
    return values


def laid(flat: torch.Tensor, key: ProductKey, name: str) -> torch.Tensor:
    """Return elements [length] viewed as the matrix "a", "b" or "out" of a key."""
    return flat.as_strided(key.matrices[name], (key.leading[f"leading_{name}"], 1))


class RowChecksums:
    """Checksums of the rows of a int8 [M, K] times b int8 [N, K] transposed."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
        self._vector = torch.randint(least, most, (b.shape[0],), generator=generator).to(b.device)
        self._expected = _times(a, _times(b.t(), self._vector))

    def first_wrong_row(self, sums: torch.Tensor) -> int | None:
        wrong = (_times(sums, self._vector) != self._expected).nonzero()
        return None if len(wrong) == 0 else int(wrong[0])


def _times(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Return int64 [R]: integers [R, C] times int64 [C], modulo 2^64."""
    rows = max(1, _ELEMENTS // matrix.shape[1])
    return torch.cat([(block.to(torch.int64) * vector).sum(dim=1) for block in matrix.split(rows)])
