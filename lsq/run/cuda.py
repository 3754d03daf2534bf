"""A GPU, or the emulator of a GPU: lists of launches that one call replays.

The launches of an operation depend on shapes alone. So `Operation.cuda` gets tensors without
memory, each with its own storage. An argument of a launch may be a part of such a tensor; its
storage says which field or scratch memory that is. Launches read addresses from structs, so tensors
may move between two runs.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch

from lsq import emulator, gemm
from lsq.gemm import lookup
from lsq.gemm.configuration import FASTER_LIBRARIES
from lsq.gemm.cublaslt import Choose, Products, TunedChoice, first_candidate
from lsq.gemm.product_key import ProductKey, key_of
from lsq.native import compiler
from lsq.native.addresses import StructAddresses, contiguous_address, tensor_address
from lsq.native.device import Device
from lsq.native.launch import Launch, Product
from lsq.native.launch_list import LaunchList, Part
from lsq.native.products import ProductLibrary, find_cublaslt
from lsq.native.runtime import Driver
from lsq.program.backend import Backend, Call
from lsq.program.declare import address_words
from lsq.program.operation import Operation, Spec
from lsq.program.program import Program
from lsq.program.samples import placed

KEPT = 1024
"""Most lists that `CUDA.run` keeps; it drops the least recently used."""


def require_gpu(index: int = 0) -> tuple[str, Driver]:
    """Return (architecture to compile kernels for, driver) of a GPU that PyTorch sees; make no
    context. Raises RuntimeError: there is no such GPU, driver or compiler, or the driver is older
    than the compiler; ValueError: the GPU is too old for the kernels."""
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
    """Say why layers cannot run on GPU `index`, with the remedy; None: they can."""
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
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Device:
    """Return the emulator, which runs kernels on the CPU, for tests.

    Args:
        sanitize: build it with sanitizers; see lsq.emulator.build.build_driver.
        choose: picks the algorithms of products.
        device: device of the tensors that it works on; the CPU must be able to read their memory.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    driver = Driver(str(emulator.build_driver(sanitize)), device.index or 0)
    library = str(emulator.build_products(sanitize))
    return Device(
        name="CUDA emulator on the CPU",
        driver=driver,
        torch_device=device,
        compile=lambda kernel: emulator.compile_kernels(kernel.source, kernel.defines, sanitize),
        products=Products(device, current=driver.current, library=library, choose=choose),
    )


@functools.cache
def gpu(index: int = 0, choose: Choose | None = None) -> Device:
    """Return the GPU that PyTorch sees under this number. `choose` picks the algorithms of
    products; None: tuned files do. Raises as `require_gpu`."""
    target, driver = require_gpu(index)
    device = torch.device("cuda", index)
    return Device(
        name=torch.cuda.get_device_name(device),
        driver=driver,
        torch_device=device,
        compile=lambda kernel: (
            compiler.compile_kernels(kernel.source, kernel.defines, target).image
        ),
        products=Products(
            device, current=driver.current, choose=choose or TunedChoice(lookup.table())
        ),
    )


class CUDA(Backend):
    """Runs `Operation.cuda`, as one list for operations prepared together. `kept`: most lists of
    `run`."""

    few_sizes = True
    refillable = True
    leaves_sums = True
    column_multiple = 16
    packed_rows = 64  # one row of tiles: each tile unpacks the codes that it multiplies
    starts_scales = True

    def __init__(
        self, target: Device, *, activations: torch.dtype = torch.float32, kept: int = KEPT
    ):
        self.target = target
        self.activations = activations
        self.name, self.device = target.name, target.torch_device
        if self.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(self.device)
            self.transposed_weights = 10 * major + minor in FASTER_LIBRARIES
        self._most = kept
        self._kept: OrderedDict[tuple, LaunchList] = OrderedDict()
        self._lock = threading.Lock()

    def scratch(self, operation: Operation) -> Sequence[Spec]:
        return operation.cuda_scratch()

    def check(self, tensor: torch.Tensor, name: str) -> None:
        tensor_address(tensor, self.device, name)

    def prepare(self, calls: Sequence[Call]) -> Callable[[], None]:
        parts = [part_of(*call, self.device) for call in calls]
        made = LaunchList(self.target, parts)
        moving = [
            part.addresses for (_, scratch), part in zip(calls, parts, strict=True) if scratch
        ]

        def run() -> None:
            for addresses in moving:
                addresses.follow()
            made.run()

        return run

    def run(self, operation: Operation) -> None:
        """Run an operation now, on the current stream. The caller keeps its tensors until it is
        done.

        Lists without scratch memory are kept for the next call on the same memory, since gradient
        buckets and their messages have the same addresses in every step. A kept list holds no
        tensor.
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
                found = LaunchList(self.target, [part_of(operation, (), self.device, hold=False)])
                self._kept[key] = found
            self._kept.move_to_end(key)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return found


class AbsentGPU(CUDA):
    """A GPU that is not here. Programs are built for it to be planned, counted or compiled."""

    name = "cuda"

    def __init__(self, activations: torch.dtype = torch.bfloat16):
        self.activations = activations


def part_of(
    operation: Operation,
    scratch: Sequence[torch.Tensor],
    device: torch.device,
    *,
    hold: bool = True,
) -> Part:
    """Return the launches of an operation on real tensors of `device`, for a LaunchList.

    The list reads the operation's struct in every run, and the addresses of `scratch` at every
    `follow`. `hold`: whether the list keeps the operation's tensors alive. Raises ValueError: the
    operation cannot take these tensors.
    """

    def held() -> Iterable[torch.Tensor]:
        return (*operation.inputs, *operation.outputs, *scratch)

    bound, memory = operation.bind(_without_memory), [_without_memory(tensor) for tensor in scratch]
    addresses = StructAddresses(bound, operation.packed, held if hold else tuple)
    words = address_words(type(operation))
    for leaf in operation.leaves():
        tensor = leaf.of(operation)
        if tensor is not None:
            contiguous_address(tensor, device, f"{operation.name}.{leaf.name}")
            addresses.know_field(leaf.of(bound), words[leaf.path])
    for tensor, known in zip(scratch, memory, strict=True):
        contiguous_address(tensor, device, f"scratch memory of {operation.name}")
        addresses.know_scratch(known, tensor)
    return Part(entries=bound.cuda(*memory), addresses=addresses, title=operation.name)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def products_of(program: Program, activations: torch.dtype = torch.bfloat16) -> list[ProductKey]:
    """Return the products of a program on a GPU, each once, in order. Raises ValueError: an
    operation has no CUDA implementation, or cannot take these shapes."""
    with gemm.ended_by(None):  # so products of lsq's own kernels are listed, too
        launched = launched_by_operation(program, activations)
    entries = (entry for each in launched for entry in each)
    return list(dict.fromkeys(key_of(entry) for entry in entries if isinstance(entry, Product)))


def launched_by_operation(
    program: Program, activations: torch.dtype
) -> list[list[Launch | Product]]:
    """Return the launches and products of each operation, on tensors without memory. A tensor that
    several operations read is the same object for all."""
    shared = {}
    return [_entries(operation, activations, shared) for operation in program.operations]


def _entries(
    operation: Operation, activations: torch.dtype, shared: dict
) -> list[Launch | Product]:
    bound = placed(operation, "meta", activations, shared)
    scratch = [
        torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in bound.cuda_scratch()
    ]
    return bound.cuda(*scratch)
