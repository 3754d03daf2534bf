"""Runs lists of launches and products on a GPU or in the emulator, through the same launcher."""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from lsq.native.addresses import Addresses
from lsq.native.launch import TICKETS, Kernel, Launch, Product
from lsq.native.launch_list import LaunchList, Part
from lsq.native.runtime import MESSAGE_BYTES, Driver

WORKSPACE_ALIGNMENT = 256


class StreamMemory:
    """The workspace of products, and words for tickets: zero before and after each kernel."""

    def __init__(self, torch_device: torch.device, workspace_bytes: int):
        self.torch_device = torch_device
        self.workspace = aligned_workspace(workspace_bytes, torch_device)

    @functools.cached_property
    def ticket(self) -> torch.Tensor:
        """The words for tickets. Made when a list first needs them: zeroing them is a launch, which
        a graph capture would record."""
        return torch.zeros(TICKETS, dtype=torch.int32, device=self.torch_device)

    def grow(self, workspace_bytes: int) -> None:
        """Enlarge the workspace if needed; PyTorch reuses the old one after the stream's work."""
        if self.workspace.numel() < workspace_bytes:
            self.workspace = aligned_workspace(workspace_bytes, self.torch_device)

    def clear(self) -> None:
        """Zero the tickets: a kernel that did not finish leaves them as they are."""
        with contextlib.suppress(RuntimeError):  # a GPU whose context is lost takes no more work
            self.ticket.zero_()


def aligned_workspace(size: int, torch_device: torch.device) -> torch.Tensor:
    """Return uint8 [size] at a multiple of WORKSPACE_ALIGNMENT, as cuBLASLt requires."""
    whole = torch.empty(size + WORKSPACE_ALIGNMENT, dtype=torch.uint8, device=torch_device)
    first = -whole.data_ptr() % WORKSPACE_ALIGNMENT
    return whole[first : first + size]


class Device:
    """A device that runs lists of launches.

    Args:
        name: for messages.
        driver: the CUDA driver, or the emulator's.
        compile: makes the machine code of a kernel.
        products: finds the algorithms of products (lsq.gemm.cublaslt.Products); None: lists hold
            none.
        torch_device: device of the tensors.
    """

    def __init__(
        self,
        *,
        name: str,
        driver: Driver,
        compile: Callable[[Kernel], bytes],
        products,
        torch_device: torch.device,
    ):
        self.name = name
        self.torch_device = torch_device
        self.driver = driver
        self.products = products
        self._compile = compile
        self._functions: dict[tuple[Kernel, int], int] = {}
        self._memories: dict[int, StreamMemory] = {}
        self._of_captures: StreamMemory | None = None
        self.lock = threading.RLock()
        """Held during a launch: lists share memory. Reentrant: a signal handler may launch."""
        self.message = ctypes.create_string_buffer(MESSAGE_BYTES)
        """The error of a launch."""

    def function(self, kernel: Kernel, shared: int) -> int:
        """Return the driver's handle of a kernel; the first call compiles and loads the kernel."""
        key = kernel, shared
        if key not in self._functions:
            self._functions[key] = self.driver.load(self._compile(kernel), kernel.name, shared)
        return self._functions[key]

    def list(
        self, entries: Sequence[Launch | Product], *, title: str = "", products=None
    ) -> LaunchList:
        """Prepare `entries` to run on their tensors, which the list keeps."""
        return LaunchList(
            self,
            [Part(entries=entries, addresses=Addresses(self.torch_device), title=title)],
            products,
        )

    def run(self, entries: Sequence[Launch | Product]) -> None:
        self.list(entries).run()

    def memory(self, stream: int, workspace_bytes: int, capturing: bool) -> StreamMemory:
        """Return the memory that all work of a stream shares, its workspace at least
        `workspace_bytes` long.

        In a capture every list gets its own memory, since the graph may run on any stream.
        """
        if capturing and self._of_captures is None:
            return StreamMemory(self.torch_device, workspace_bytes)
        if capturing:
            self._of_captures.grow(workspace_bytes)
            return self._of_captures
        if stream not in self._memories:
            self._memories[stream] = StreamMemory(self.torch_device, workspace_bytes)
        self._memories[stream].grow(workspace_bytes)
        return self._memories[stream]

    @contextlib.contextmanager
    def captures_in_turn(self) -> Iterator[None]:
        """Let all captures within this context share one memory, which is made first. Their graphs
        must run one after another, and none after the context."""
        self._of_captures = StreamMemory(self.torch_device, 0)
        self._of_captures.ticket.zero_()
        try:
            yield
        finally:
            self._of_captures = None

    def record(self, tensor: torch.Tensor) -> None:
        """Tell PyTorch's allocator that the current stream uses a tensor."""
        if self.torch_device.type != "cpu":
            tensor.record_stream(torch.accelerator.current_stream(self.torch_device))

    def stream(self) -> int:
        if self.torch_device.type == "cuda":
            return torch.cuda.current_stream(self.torch_device).cuda_stream
        return (
            torch.accelerator.current_stream(self.torch_device).stream_id
            if self.torch_device.type != "cpu"
            else 0
        )

    def synchronize(self) -> None:
        if self.torch_device.type != "cpu":
            torch.accelerator.current_stream(self.torch_device).synchronize()
