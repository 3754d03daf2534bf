"""A GPU, or the emulator of one: lists of launches that one call replays."""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from lsq import emulator
from lsq.gemm import lookup
from lsq.gemm.cublaslt import Choose, Products, TunedChoice, first_candidate
from lsq.native import compiler
from lsq.native.addresses import tensor_address
from lsq.native.device import Device
from lsq.native.launch_list import LaunchList
from lsq.native.runtime import Driver
from lsq.program.backend import Backend, Call
from lsq.program.operation import Operation, Spec
from lsq.run.launches import part_of
from lsq.run.requirements import require_gpu

KEPT = 1024
"""Lists that are kept for calls on the same memory; those used longest ago are dropped."""


@functools.cache
def emulated_device(
    sanitize: bool = False,
    choose: Choose = first_candidate,
    place: torch.device = torch.device("cpu"),  # noqa: B008
) -> Device:
    """The emulator: runs kernels on the CPU, for tests and for `lsq doctor --emulate`.

    Args:
        sanitize: see lsq.emulator.
        choose: picks the algorithms of products.
        place: whose tensors it works on; the CPU must be able to read their memory.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    driver = Driver(str(emulator.build_driver(sanitize)), place.index or 0)
    library = str(emulator.build_products(sanitize))
    return Device(
        name="CUDA emulator on the CPU",
        driver=driver,
        place=place,
        compile=lambda kernel: emulator.compile_kernels(kernel.source, kernel.defines, sanitize),
        products=Products(place, current=driver.current, library=library, choose=choose),
    )


@functools.cache
def gpu(index: int = 0, choose: Choose | None = None) -> Device:
    """A GPU that PyTorch sees, by its number.

    Args:
        choose: picks the algorithms of products; None: as they are tuned.

    Raises:
        RuntimeError, ValueError: it cannot be used; see `lsq.run.requirements`.
    """
    target, driver = require_gpu(index)
    place = torch.device("cuda", index)
    return Device(
        name=torch.cuda.get_device_name(place),
        driver=driver,
        place=place,
        compile=lambda kernel: (
            compiler.compile_kernels(kernel.source, kernel.defines, target).image
        ),
        products=Products(
            place, current=driver.current, choose=choose or TunedChoice(lookup.table("cuda"))
        ),
    )


class CUDA(Backend):
    """Runs what `Operation.cuda` returns on a device; operations that are prepared together are one
    list.

    Args:
        target: the device.
        activations: the dtype of activations in programs: float32 or bfloat16.
        kept: lists that `run` keeps.
    """

    few_sizes = True
    refillable = True
    leaves_sums = True
    transposed_weights = True
    packed_rows = 64  # a row of tiles, of which each unpacks what it multiplies
    starts_scales = True

    def __init__(
        self, target: Device, *, activations: torch.dtype = torch.float32, kept: int = KEPT
    ):
        self.device = target
        self.activations = activations
        self.name, self.place = target.name, target.place
        self._most = kept
        self._kept: OrderedDict[tuple, LaunchList] = OrderedDict()
        self._lock = threading.Lock()

    def scratch(self, operation: Operation) -> Sequence[Spec]:
        return operation.cuda_scratch()

    def check(self, tensor: torch.Tensor, name: str) -> None:
        tensor_address(tensor, self.place, name)

    def prepare(self, calls: Sequence[Call]) -> Callable[[], None]:
        parts = [part_of(*call, self.place) for call in calls]
        made = LaunchList(self.device, parts)
        moving = [
            part.addresses for (_, scratch), part in zip(calls, parts, strict=True) if scratch
        ]

        def run() -> None:
            for addresses in moving:
                addresses.follow()
            made.run()

        return run

    def run(self, operation: Operation) -> None:
        """Run one operation now, on the current stream; the caller keeps its tensors until it is
        done.

        Launches that need no scratch are kept for calls on the same memory: buckets of gradients
        and their messages lie at the same addresses in every step. What is kept knows addresses,
        shapes and dtypes, and holds no tensor. Threads may share it.
        """
        if self.scratch(operation):
            super().run(operation)
        else:
            self._list_for(operation).run()

    def _list_for(self, operation: Operation) -> LaunchList:
        tensors = (leaf.of(operation) for leaf in operation.leaves())
        described = (
            None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors
        )
        key = type(operation), *described, *operation.attributes().items()
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = LaunchList(self.device, [part_of(operation, (), self.place, hold=False)])
                self._kept[key] = found
            self._kept.move_to_end(key)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return found
