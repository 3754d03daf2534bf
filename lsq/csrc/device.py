"""Runs lists of launches and products: on a GPU, or in the emulator, through the same launcher."""

from collections.abc import Callable, Sequence

import torch

from lsq.csrc.launch import Kernel, Launch, Product
from lsq.csrc.launch_list import LaunchList
from lsq.csrc.runtime import Driver


class Device:
    """Where lists of launches run.

    Args:
        name: for people.
        driver: the CUDA driver, or the emulator's.
        compile: makes the machine code of a kernel.
        products: finds the algorithms of products (lsq.gemm.cublaslt.Products); None where lists hold none.
        place: the torch device whose tensors it works on.
    """

    def __init__(
        self, *, name: str, driver: Driver, compile: Callable[[Kernel], bytes], products, place: torch.device
    ):
        self.name = name
        self.place = place
        self.driver = driver
        self.products = products
        self._compile = compile
        self._functions: dict[tuple[Kernel, int], int] = {}

    def function(self, kernel: Kernel, shared: int) -> int:
        """The driver's handle of a kernel, compiled and loaded when it is first wanted."""
        key = kernel, shared
        if key not in self._functions:
            self._functions[key] = self.driver.load(self._compile(kernel), kernel.name, shared)
        return self._functions[key]

    def list(self, entries: Sequence[Launch | Product], **options) -> LaunchList:
        """Prepare `entries` for running; options: see LaunchList."""
        return LaunchList(self, entries, **options)

    def run(self, entries: Sequence[Launch | Product]) -> None:
        """Run `entries` once on the current stream."""
        self.list(entries).run()

    def stream(self) -> int:
        """The handle of PyTorch's current stream on this device."""
        return torch.cuda.current_stream(self.place).cuda_stream if self.place.type == "cuda" else 0

    def synchronize(self) -> None:
        """Wait until everything launched on the current stream is done."""
        if self.place.type == "cuda":
            torch.cuda.current_stream(self.place).synchronize()
