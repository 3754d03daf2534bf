"""Trials of products with the epilogue of their operation: by cuBLASLt and a second kernel, or by
one kernel's tiles.

Both are lists of launches of the same operation. Sums of cuBLASLt are checked by themselves.
Outputs of tiles are compared with outputs from exact sums; integers must be equal.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from lsq import gemm
from lsq.gemm.configuration import (
    TILE_COLUMNS,
    TILE_ROWS,
    WGMMA_SM,
    Configuration,
    CublasConfiguration,
    TileConfiguration,
    default_tile,
)
from lsq.gemm.cublaslt import ChosenProduct
from lsq.gemm.operations import OVER_TOKENS
from lsq.gemm.product_key import ProductKey
from lsq.native.device import Device
from lsq.native.geometry import multiprocessors
from lsq.native.launch import TICKETS, Launch, Product
from lsq.native.launch_list import LaunchList
from lsq.program.operation import Operation, Spec
from lsq.program.samples import Sampler

Operations = Mapping[str, Callable[[ProductKey], Operation]]
"""`ProductKey.op` -> makes a representative operation with that product, of virtual tensors."""
STAGES = {"mma": (2, 3, 4, 6), "wgmma": (3, 4, 5)}
"""Stages of the tiles that are tried, by instruction; GPUs with little shared memory refuse
most."""
SPLITS = (1, 2, 4, 8)
"""Parts of K that are tried for products over tokens."""
REFERENCE_ELEMENTS = 2**24
"""Sums that are computed in float64 at a time."""
TOLERANCE = 1e-3
"""Largest error of floats, relative to the largest magnitude of their tensor."""


def tiles(key: ProductKey, sm: int | None) -> list[TileConfiguration]:
    """Return every tile that is tried for a product on a GPU of compute capability `sm`."""
    splits = SPLITS if key.op == OVER_TOKENS else (1,)
    all_tiles = []
    for instruction in ("mma", "wgmma") if sm == WGMMA_SM else ("mma",):
        for rows, columns, stages, split in itertools.product(
            TILE_ROWS, TILE_COLUMNS[instruction], STAGES[instruction], splits
        ):
            with contextlib.suppress(ValueError):  # a block cannot hold it
                tile = TileConfiguration(
                    rows=rows, columns=columns, stages=stages, split=split, instruction=instruction
                )
                all_tiles.append(tile)
    return [
        tile
        for tile in all_tiles
        if tile.split == 1 or math.prod(tile.blocks(key.m, key.n)) <= TICKETS
    ]


class EndedTrial:
    """A product of an operation, with its epilogue, on a device. `by_itself`: the CublasTrial
    without the epilogue. Raises ValueError: products of this operation are not tuned."""

    def __init__(
        self, key: ProductKey, device: Device, operations: Operations, by_itself: Any
    ) -> None:
        if key.op not in operations:
            by_itself.close()
            raise ValueError(
                f"op is {key.op!r}, which a GPU makes by tiles of a rule alone: leave it out"
            )
        self.key, self.device, self._by_itself = key, device, by_itself
        first = Sampler(device.torch_device, torch.bfloat16).operation(operations[key.op](key))
        others = by_itself.backend.copies(key) - 1
        self._operations = [first, *(first.bind(torch.Tensor.clone) for _ in range(others))]
        self._scratch: dict[tuple[int, Spec], torch.Tensor] = {}
        self._expected: list[torch.Tensor] | None = None
        self._lists: dict[tuple[Configuration, int], LaunchList] = {}
        self._chosen: dict[CublasConfiguration, ChosenProduct] = {}

    def candidates(self) -> Sequence[Configuration]:
        sm = self._by_itself.backend.sm
        ways = [*self._by_itself.candidates(), *tiles(self.key, sm)]
        default = default_tile(self.key, sm, multiprocessors()) or ways[0]
        return [default, *(way for way in ways if way != default)]

    def fault(self, configuration: Configuration) -> str | None:
        if isinstance(configuration, CublasConfiguration):
            return self._by_itself.fault(configuration)
        expected = self._exact()
        written = self._operations[0].outputs
        for tensor in written:
            tensor.zero_()
        try:
            self._list(configuration, 0).run()
            self.device.synchronize()
        except (RuntimeError, ValueError) as error:
            return str(error)
        differing = sum(int((~_equal(*pair)).sum()) for pair in zip(written, expected, strict=True))
        return f"{differing} of its results are wrong" if differing else None

    def seconds(self, configuration: Configuration, repeats: int) -> float:
        lists = [
            self._list(configuration, number)
            for number in range(min(repeats, len(self._operations)))
        ]
        return self._by_itself.backend.time(
            lambda number: lists[number % len(lists)].run(), repeats
        )

    def float_seconds(self, repeats: int) -> float:
        return self._by_itself.float_seconds(repeats)

    def close(self) -> None:
        self.device.synchronize()
        self._lists.clear()
        for chosen in self._chosen.values():
            chosen.native.close()
        self._by_itself.close()

    def _exact(self) -> list[torch.Tensor]:
        """Return the outputs of the first operation from exact sums."""
        if self._expected is None:
            entries = self._entries(None, self._operations[0])
            at = next(i for i, entry in enumerate(entries) if isinstance(entry, Product))
            self.device.run(entries[:at])
            _multiply(entries[at])
            self.device.run(entries[at + 1 :])
            self._expected = [tensor.clone() for tensor in self._operations[0].outputs]
        return self._expected

    def _entries(
        self, tile: TileConfiguration | None, operation: Operation
    ) -> list[Launch | Product]:
        with gemm.ended_by(tile):
            return operation.cuda(*map(self._memory, enumerate(operation.cuda_scratch())))

    def _memory(self, wanted: tuple[int, Spec]) -> torch.Tensor:
        """Return scratch memory, shared by all lists: it is in the cache, as planned memory is."""
        if wanted not in self._scratch:
            shape, dtype = wanted[1]
            self._scratch[wanted] = torch.empty(shape, dtype=dtype, device=self.device.torch_device)
        return self._scratch[wanted]

    def _list(self, configuration: Configuration, number: int) -> LaunchList:
        if (configuration, number) not in self._lists:
            tiled = isinstance(configuration, TileConfiguration)
            entries = self._entries(configuration if tiled else None, self._operations[number])
            self._lists[configuration, number] = self.device.list(
                entries,
                title=str(self.key),
                products=SimpleNamespace(prepare=lambda _: self._native(configuration)),
            )
        return self._lists[configuration, number]

    def _native(self, configuration: CublasConfiguration) -> ChosenProduct:
        if configuration not in self._chosen:
            products = self.device.products
            native = products.describe(self.key)
            with products.current():
                native.choose(configuration.algorithm)
            self._chosen[configuration] = ChosenProduct(
                key=self.key, native=native, algorithm=configuration
            )
        return self._chosen[configuration]


def _equal(x: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return bool for each element; floats may have been added in another order."""
    if not x.is_floating_point():
        return x == expected
    tolerance = float(TOLERANCE * expected.abs().max())
    return x.isclose(expected, rtol=0.0, atol=tolerance, equal_nan=True)


def _multiply(product: Product) -> None:
    """Write exact sums, a few rows at a time."""
    wide = product.b.double().mT
    step = max(1, REFERENCE_ELEMENTS // product.b.shape[0])
    for rows, out in zip(product.a.split(step), product.out.split(step), strict=True):
        out.copy_(rows.double() @ wide)
