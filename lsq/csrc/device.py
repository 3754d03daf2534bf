"""Runs lists of launches and products: on a GPU, or in the emulator, through the same launcher."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lsq.csrc import compiler, emulator
from lsq.csrc.launch import Kernel, Launch, Product
from lsq.csrc.launch_list import LaunchList, Products
from lsq.csrc.runtime import Driver


class Device:
    """Where lists of launches run.

    Args:
        name: for people.
        driver: the CUDA driver, or the emulator's.
        compile: makes the machine code of a kernel.
        products: finds the algorithms of products; None where lists hold none.
        place: the torch device whose tensors it works on.
    """

    def __init__(
        self, *, name: str, driver: Driver, compile: Callable[[Kernel], bytes], products: Products | None,
        place: torch.device,
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


@functools.cache
def emulated_driver(sanitize: bool = False) -> Driver:
    """The emulator as a driver; built with g++ when it is first wanted."""
    return Driver(str(emulator.build_driver(sanitize)))


def emulated_device(products: Callable[[Path], Products] | None = None, *, sanitize: bool = False) -> Device:
    """The emulator: runs kernels on the CPU, for tests and for `lsq doctor --emulate`.

    Args:
        products: makes what finds algorithms from the path of a libcublasLt.
        sanitize: see lsq.csrc.emulator.

    Raises:
        RuntimeError: there is no C++ compiler.
    """

    def compile(kernel: Kernel) -> bytes:
        return emulator.compile_kernels(kernel.source, kernel.defines, sanitize)

    return Device(
        name="CUDA emulator on the CPU", driver=emulated_driver(sanitize), compile=compile,
        products=products(emulator.build_products(sanitize)) if products else None, place=torch.device("cpu"),
    )


def gpu_device(index: int = 0, products: Callable[[], Products] | None = None) -> Device:
    """A GPU that PyTorch sees, by its number.

    Raises:
        RuntimeError: there is no such GPU, or its driver is older than the compiler.
        ValueError: the GPU is too old for the kernels.
    """
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise RuntimeError(
            f"there is no GPU {index} that PyTorch can use (it sees {torch.cuda.device_count()}); install the NVIDIA "
            "driver and a CUDA build of PyTorch, or train on the CPU"
        )
    place = torch.device("cuda", index)
    target = compiler.architecture(torch.cuda.get_device_capability(place))
    driver = Driver("libcuda.so.1")
    compiler.check_driver(driver.version)
    torch.zeros(1, device=place)  # makes the context that kernels are loaded into

    def compile(kernel: Kernel) -> bytes:
        return compiler.compile_kernels(kernel.source, kernel.defines, target).image

    return Device(
        name=torch.cuda.get_device_name(place), driver=driver, compile=compile,
        products=products() if products else None, place=place,
    )
