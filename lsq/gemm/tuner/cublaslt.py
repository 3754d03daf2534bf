"""Trials of cuBLASLt's products: algorithms, operands on a GPU, exact checks, and times by CUDA
events.

An algorithm is an id with a tile, stages, parts of K that are added up, and more
(lsq.native.products.CONFIGURATION). The library proposes some, and says what each can do and
whether it runs the product at hand (AlgoCheck, which takes microseconds). On the CPU, with the
emulated library, the same code runs and times mean nothing.
"""

import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from lsq.gemm.configuration import CublasConfiguration
from lsq.gemm.cublaslt import Products
from lsq.gemm.product_key import ADDRESS_MULTIPLE, MATMUL, ProductKey
from lsq.gemm.tuner.ended import EndedTrial, Operations
from lsq.gemm.tuner.operands import LARGEST, RowChecksums, laid, whole_numbers
from lsq.native.device import Device, aligned_workspace
from lsq.native.products import Matmul, ProductError, ProductLibrary

SPLITS = (2, 3, 4, 6, 8, 12, 16, 32)
"""Numbers of parts of K that are tried."""
SCHEMES = {"int32": (1, 2, 4)}
"""Ways to add up the parts, by dtype of the result: in place, in the dtype of the sums, in that of
the result. Floats, and sums that are rounded afterwards, only in the dtype of the sums, in a fixed
order."""
CLUSTERS = (2, 3, 4, 5, 6, 7, 8, 9, 11, 12)
"""cublasLtClusterShape_t beside 0, automatic: from 1 x 1 to 8 blocks."""
MOST_CHECKED = 50_000

MOST_REPEATS = 400
MOST_SETS = 128
MOST_BYTES = 2**33
REFERENCE_ELEMENTS = 2**24
"""Results that are computed in float64 at a time."""
LARGEST_FACTOR = 7
"""Of floats, so that every sum is a whole number that float32 holds."""


class CublasBackend:
    """The products of one GPU.

    Args:
        products: of the device; their workspace is the most that algorithms may take.
        device: runs the kernels of epilogues; None: products are tried without.
        operations: representative ones, whose products are tried with their epilogues.
        exhaustive: try every algorithm, not only the library's proposals.
        cache: bytes that the operands of a product exceed together; by default the L2 cache.
    """

    def __init__(
        self,
        products: Products,
        *,
        device: Device | None = None,
        operations: Operations | None = None,
        exhaustive: bool = False,
        cache: int | None = None,
    ) -> None:
        self.products = products
        self.device, self.operations = device, operations or {}
        self.exhaustive = exhaustive
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
        """The library's proposals; in an exhaustive search, then all others within the workspace.

        Raises:
            ValueError, RuntimeError: cuBLASLt has no such product, or nothing for it.
        """
        proposals = self.products.candidates(key)
        if not proposals:
            raise RuntimeError(
                f"cuBLASLt has no algorithm for {key} in {self.products.workspace_bytes} bytes"
            )
        return proposals + self._others(key, proposals) if self.exhaustive else proposals

    def copies(self, key: ProductKey) -> int:
        """Sets of operands of a product that are used in turn."""
        return max(1, min(2 * self.cache // key.bytes + 1, MOST_SETS, MOST_BYTES // key.bytes))

    @property
    def sm(self) -> int | None:
        """Compute capability, e.g. 90; None in the emulator."""
        if not self.on_gpu:
            return None
        major, minor = torch.cuda.get_device_capability(self.products.device)
        return 10 * major + minor

    def trial(self, key: ProductKey) -> "CublasTrial | EndedTrial":
        """The trial of a product, with the epilogue of its operation if it has one.

        Raises:
            ValueError, RuntimeError: there is no such product.
        """
        if key.op == MATMUL or self.device is None:
            return CublasTrial(self, key)
        return EndedTrial(key, self.device, self.operations, CublasTrial(self, key))

    def time(self, run: Callable[[int], None], repeats: int) -> float:
        """Seconds per run by the device's clock; `run` takes the number of the run."""
        repeats = min(repeats, MOST_REPEATS)
        if not self.on_gpu:
            start = time.perf_counter()
            for number in range(repeats):
                run(number)
            return (time.perf_counter() - start) / repeats
        run(0)  # libraries load their kernels now, which none may in a capture
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream, graph = torch.cuda.Stream(self.products.device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self.products.device))
        in_turn = (
            contextlib.nullcontext() if self.device is None else self.device.captures_in_turn()
        )
        with in_turn, torch.cuda.stream(stream):
            graph.capture_begin()  # a list takes Python longer than a small product takes a GPU
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

    def _others(
        self, key: ProductKey, proposals: list[CublasConfiguration]
    ) -> list[CublasConfiguration]:
        """All other algorithms, in a fixed random order: a search may stop anywhere."""
        products, seen, others = self.products, {each.algorithm for each in proposals}, []
        with contextlib.closing(products.describe(key)) as native, products.current():
            data = [
                each for each in _all_algorithms(products.library, native, key) if each not in seen
            ]
            random.Random(0).shuffle(data)
            for each in data[:MOST_CHECKED]:
                try:
                    checked = native.check(each)
                except ProductError:
                    continue
                if each not in seen and checked.workspace_bytes <= products.workspace_bytes:
                    seen.add(each)
                    others.append(products.algorithm(checked))
        return others


def _all_algorithms(library: ProductLibrary, native: Matmul, key: ProductKey) -> Iterator[bytes]:
    for algorithm_id in native.algorithm_ids():
        try:
            fresh = native.start(algorithm_id)
            can = library.capabilities(fresh)
        except ProductError:  # an id that exists, but not for this product
            continue
        if max(can["alignment_a"], can["alignment_b"], can["alignment_d"]) > ADDRESS_MULTIPLE:
            continue
        for tile, stages in itertools.product(can["tiles"] or [0], can["stages"] or [0]):
            for changes in _variants(can, key):
                try:
                    yield library.configure(fresh, tile=tile, stages=stages, **changes)
                except ProductError:  # a value that this algorithm does not take
                    continue


def _variants(can: dict, key: ProductKey) -> Iterator[dict[str, int]]:
    """Changes of an algorithm, one at a time: all combinations would be millions."""
    yield {}
    if can["split_k"]:
        allowed = [
            scheme for scheme in SCHEMES.get(key.out, (2,)) if can["reduction_schemes"] & scheme
        ]
        for parts, scheme in itertools.product(SPLITS, allowed):
            yield {"split_k": parts, "reduction_scheme": scheme}
    if can["swizzle"]:
        yield {"swizzle": 1}
    for option in range(1, can["custom_option_max"] + 1):
        yield {"custom_option": option}
    for cluster in CLUSTERS:
        yield {"cluster_shape": cluster}


class _Operands:
    """A product in the library with sets of operands, a, b and out each, that are used in turn."""

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
        # of codes: results fill the range of int8, and some leave it
        typical = 40 / (key.k**0.5 * LARGEST**2 / 3)
        self.vector = typical * (0.5 + 2 * torch.rand(key.n, generator=generator)).to(place)
        self.alpha = {"one": None, "scalar": typical, "vector": self.vector.data_ptr()}[key.alpha]
        self.native: Matmul = backend.products.describe(key)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """a [M, K], b [N, K], out [M, N] of the first set."""
        a, b, out = self.sets[0].values()
        return (
            a.mT if self.key.layout[0] == "t" else a,
            b.mT if self.key.layout[1] == "n" else b,
            out,
        )

    def run(self, number: int) -> None:
        """Queue the product of one set."""
        backend = self.backend
        self.native.run(
            [tensor.data_ptr() for tensor in self.sets[number % len(self.sets)].values()],
            alpha=self.alpha,
            workspace=backend.workspace.data_ptr(),
            workspace_bytes=backend.workspace.nbytes,
            stream=torch.cuda.current_stream(backend.products.device).cuda_stream
            if backend.on_gpu
            else 0,
        )


class CublasTrial:
    """One product without epilogue; for comparison with int8, also the same of bfloat16.

    Operands are whole numbers, also of floats, and so small that every sum is exact in float32:
    results are right, rounded once where they are floats, or the algorithm is refused.
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
        """Seconds in bfloat16, as the library proposes first; of floats in their own dtype."""
        with self.backend.products.current():
            if self._floats is None:
                own = self._own.key
                dtype = "bfloat16" if own.dtype == "int8" else own.dtype
                key = dataclasses.replace(own, dtype=dtype, out=dtype, alpha="one")
                self._floats = _Operands(self.backend, key)
                self._floats.native.choose(self.backend.products.candidates(key)[0].algorithm)
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
        key = self._own.key
        alpha = self._own.vector if key.alpha == "vector" else self._own.alpha or 1.0
        wide = b.double().mT
        parts = []
        for block in a.split(max(1, REFERENCE_ELEMENTS // key.n)):
            scaled = (block.double() @ wide).float() * alpha
            if key.out == "int8":
                scaled = scaled.round().clamp(-LARGEST - 1, LARGEST)
            parts.append(scaled.to(getattr(torch, key.out)))
        return torch.cat(parts)
