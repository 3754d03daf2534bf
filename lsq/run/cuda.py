"""A GPU, or the emulator of one: lists of launches that one call replays.

What an operation launches depends on shapes alone. So it is asked on tensors without memory, each
with a storage of its own: by that an argument is known as a field or as scratch memory, also where
it is a part of one. Launches read everything through structs, so that tensors may move between two
runs.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch

from lsq import emulator
from lsq.gemm import lookup
from lsq.gemm.cublaslt import Choose, Products, TunedChoice, first_candidate
from lsq.native import compiler
from lsq.native.addresses import StructAddresses, contiguous_address, tensor_address
from lsq.native.device import Device
from lsq.native.launch_list import LaunchList, Part
from lsq.native.products import ProductLibrary, find_cublaslt
from lsq.native.runtime import Driver
from lsq.program.backend import Backend, Call
from lsq.program.declare import address_words
from lsq.program.operation import Operation, Spec

KEPT = 1024
"""Lists that are kept for calls on the same memory; those used longest ago are dropped."""


def require_gpu(index: int = 0) -> tuple[str, Driver]:
    """(architecture that kernels are compiled for, driver) of a GPU that PyTorch sees, by its
    number.

    No context is made, so that a process may ask about a GPU that another one will use.

    Raises:
        RuntimeError: there is no such GPU, no driver or compiler, or its driver is older than the
            compiler.
        ValueError: the GPU is too old for the kernels.
    """
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise RuntimeError(
            f"there is no GPU {index} that PyTorch can use (it sees {torch.cuda.device_count()});"
            f" {compiler.remedy()}, or train on the CPU"
        )
    target = compiler.architecture(torch.cuda.get_device_capability(index))
    driver = Driver("libcuda.so.1", index)
    compiler.check_driver(driver.version)
    return target, driver


def gpu_fault(index: int = 0) -> str | None:
    """Why layers cannot run on that GPU, in a sentence with its remedy; None: they can."""
    try:
        require_gpu(index)
        ProductLibrary(find_cublaslt())
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


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
        RuntimeError, ValueError: it cannot be used; see `require_gpu`.
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
            place, current=driver.current, choose=choose or TunedChoice(lookup.table())
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


class AbsentGPU(CUDA):
    """A GPU that is not here: programs are built for it, to be planned, counted or compiled, and
    nothing runs.

    Args:
        activations: their dtype in programs: float32 or bfloat16.
    """

    name = "cuda"

    def __init__(self, activations: torch.dtype = torch.bfloat16):
        self.activations = activations


def part_of(
    operation: Operation, scratch: Sequence[torch.Tensor], place: torch.device, *, hold: bool = True
) -> Part:
    """The launches of an operation on real tensors, for a list (lsq.native.launch_list.LaunchList).

    Args:
        operation: its struct, Operation.packed, is read at every run.
        scratch: tensors for itself, which stay; where their memory lies is looked up when addresses
            `follow`.
        place: the device where they must lie.
        hold: whether the list keeps the operation and its memory.

    Raises:
        ValueError: the operation cannot take these tensors.
    """

    def held() -> Iterable[torch.Tensor]:
        return (*operation.inputs, *operation.outputs, *scratch)

    bound, memory = operation.bind(_without_memory), [_without_memory(tensor) for tensor in scratch]
    addresses = StructAddresses(bound, operation.packed, held if hold else tuple)
    words = address_words(type(operation))
    for leaf in operation.leaves():
        tensor = leaf.of(operation)
        if tensor is not None:
            contiguous_address(tensor, place, f"{operation.name}.{leaf.name}")
            addresses.know_field(leaf.of(bound), words[leaf.path])
    for tensor, known in zip(scratch, memory, strict=True):
        contiguous_address(tensor, place, f"scratch memory of {operation.name}")
        addresses.know_scratch(known, tensor)
    return Part(entries=bound.cuda(*memory), addresses=addresses, title=operation.name)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
