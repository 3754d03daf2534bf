"""Launches and products with their tensors, turned into a list that C++ replays with one call."""

import contextlib
import ctypes
import itertools
import struct
from collections.abc import Sequence

import torch

from lsq.csrc import runtime
from lsq.csrc.launch import TICKET, Launch, Product, check

ALIGNMENT = 16
"""Bytes to whose multiples the addresses of tensors must be aligned."""
WORKSPACE_ALIGNMENT = 256


class LaunchList:
    """Launches and products that `run` replays with one call into C++, on PyTorch's current stream.

    The list keeps the tensors of its entries alive and works on their addresses. Between two runs on different streams,
    the caller must synchronise.

    Args:
        device: the lsq.csrc.device.Device where it runs.
        entries: what an operation's `cuda` returns, or several of these one after another.
        title: what to call the list in errors.
        forget: keep no tensor alive, but work on whatever lies at the same addresses later.

    Raises:
        ValueError: a tensor lies elsewhere, is not contiguous or not aligned.
        RuntimeError: a kernel does not compile or load, or a product has no algorithm.
    """

    def __init__(self, device, entries: Sequence[Launch | Product], *, title: str = "", forget: bool = False):
        self.device = device
        self._entries = list(entries)
        self._tickets = self._new_tickets()
        prepared = [device.products.prepare(entry) for entry in self._entries if isinstance(entry, Product)]
        largest = max((one.algorithm.workspace_bytes for one in prepared), default=0)
        self._workspace = aligned_workspace(largest, device.place)
        self._library = runtime.library()
        self._list = ctypes.c_void_p(self._library.lsq_list_create(device.driver.handle))
        self._message = ctypes.create_string_buffer(runtime.MESSAGE_BYTES)
        for entry in self._entries:
            if isinstance(entry, Launch):
                self._add_launch(entry, title)
            else:
                self._add_product(entry, prepared.pop(0), title)
        self._library.lsq_list_close(self._list)
        if forget:
            self._entries = []

    def run(self) -> None:
        """Launch everything on PyTorch's current stream.

        Raises:
            RuntimeError: a launch failed; the message names the kernel or product and its sizes.
        """
        stream, size = ctypes.c_void_p(self.device.stream()), ctypes.c_int64(runtime.MESSAGE_BYTES)
        if self._library.lsq_list_run(self._list, stream, self._message, size):
            with contextlib.suppress(RuntimeError):  # a GPU whose context is lost takes no more work
                self._ticket_memory.zero_()  # a kernel that did not finish leaves them as they are
            raise RuntimeError(self._message.value.decode(errors="replace"))

    def __del__(self) -> None:
        if hasattr(self, "_list"):
            self._library.lsq_list_destroy(self._list)

    def _new_tickets(self):
        launches = [entry for entry in self._entries if isinstance(entry, Launch)]
        wanted = sum(value is TICKET for entry in launches for value in entry.arguments)
        self._ticket_memory = torch.zeros(2 * max(1, wanted), dtype=torch.int32, device=self.device.place)
        first = self._ticket_memory.data_ptr()
        return iter(range(first, first + 8 * wanted, 8))

    def _argument(self, value, what: str) -> bytes:
        """What a kernel reads: 8 bytes of a pointer, an int64_t or (in the first four) a float, or a struct."""
        place = self.device.place
        if hasattr(value, "pack"):
            return value.pack(lambda tensor: contiguous_address(tensor, place, what))
        if isinstance(value, float):
            return struct.pack("<fxxxx", value)
        if value is None:
            value = 0
        elif value is TICKET:
            value = next(self._tickets)
        elif isinstance(value, torch.Tensor):
            value = contiguous_address(value, place, what)
        return struct.pack("<q", value)

    def _add_launch(self, entry: Launch, title: str) -> None:
        what = f"{title}: {entry.kernel}" if title else str(entry.kernel)
        function = self.device.function(entry.kernel, entry.shared)
        values = [self._argument(value, what) for value in entry.arguments]
        *begins, count = itertools.accumulate((len(value) // 8 for value in values), initial=0)
        self._library.lsq_list_add_launch(
            self._list, what.encode(), ctypes.c_void_p(function), (ctypes.c_int64 * 6)(*entry.grid, *entry.block),
            ctypes.c_int64(entry.shared), b"".join(values), ctypes.c_int64(count),
            (ctypes.c_int64 * len(values))(*begins), ctypes.c_int64(len(values)),
        )

    def _add_product(self, entry: Product, prepared, title: str) -> None:
        what = f"{title}: {prepared}" if title else str(prepared)
        place, vector = self.device.place, isinstance(entry.alpha, torch.Tensor)
        a, b, out = (tensor_address(tensor, place, what) for tensor in (entry.a, entry.b, entry.out))
        alphas = tensor_address(entry.alpha, place, what) if vector else None
        self._library.lsq_list_add_product(
            self._list, what.encode(), *map(ctypes.c_void_p, (prepared.native.address, a, b, out, alphas)),
            ctypes.c_float(1.0 if vector else entry.alpha), ctypes.c_void_p(self._workspace.data_ptr()),
            ctypes.c_int64(self._workspace.numel()),
        )


def contiguous_address(tensor: torch.Tensor, place: torch.device, what: str) -> int:
    """Where a kernel on `place` finds a tensor; `what` begins the message of an error.

    Raises:
        ValueError: the tensor is not contiguous, lies elsewhere, or is not aligned.
    """
    check(
        tensor.is_contiguous(),
        f"{what}: a tensor with strides {tensor.stride()} is not contiguous; call .contiguous()",
    )
    return tensor_address(tensor, place, what)


def tensor_address(tensor: torch.Tensor, place: torch.device, what: str) -> int:
    """The same for a tensor that may have any strides."""
    check(
        tensor.device == place,
        f"{what}: a tensor lies on {tensor.device}, but this list runs on {place}; move it with .to()",
    )
    found = tensor.data_ptr()
    check(
        found % ALIGNMENT == 0,
        f"{what}: a tensor begins {found % ALIGNMENT} bytes after a multiple of {ALIGNMENT}; copy it with .clone()",
    )
    return found


def aligned_workspace(size: int, place: torch.device) -> torch.Tensor:
    """uint8 [size] on a device that begins at a multiple of WORKSPACE_ALIGNMENT, as cuBLASLt wants its workspace."""
    whole = torch.empty(size + WORKSPACE_ALIGNMENT, dtype=torch.uint8, device=place)
    first = -whole.data_ptr() % WORKSPACE_ALIGNMENT
    return whole[first : first + size]
