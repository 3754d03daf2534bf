"""Launches and products with their tensors, as a list that C++ replays with one call."""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lsq.native import runtime
from lsq.native.addresses import Addresses
from lsq.native.launch import TICKET, Launch, Product, check


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Entries that run one after another."""

    entries: Sequence[Launch | Product]
    addresses: Addresses
    title: str = ""
    """Name of the entries in errors."""


class LaunchList:
    """Launches and products that `run` replays with one call into C++, on PyTorch's current stream.

    Structs and addresses are read in every run, from where the Addresses say; a captured graph
    reads them once, in the capture. A run waits for the stream of the run before. Whoever made the
    list keeps the tensors that are not `held` until the work is done. `products`: finds algorithms
    in place of the device's. Raises ValueError: a tensor lies on another device, is not contiguous
    or not aligned; RuntimeError: a kernel does not compile or load, or a product has no algorithm.
    """

    def __init__(self, device, parts: Sequence[Part], products=None):
        self.device = device
        self._products = products or device.products
        self._held = [part.addresses.held for part in parts]
        self._memory: list = [part.addresses.memory for part in parts]
        self._ticket: ctypes.c_uint64 | None = None  # set if a kernel takes TICKET
        self._workspace_bytes = 0
        self._stream, self._recorded = device.stream(), set()
        self._captured: list = []
        self._library = runtime.library()
        self._list = ctypes.c_void_p(self._library.lsq_list_create(device.driver.handle))
        for part in parts:
            for entry in part.entries:
                if isinstance(entry, Launch):
                    self._add_launch(entry, part)
                else:
                    self._add_product(entry, part)

    def run(self) -> None:
        """Launch all entries on PyTorch's current stream; threads may share the list. Raises
        RuntimeError: a launch failed; the message names the kernel, or the product and its
        sizes."""
        with self.device.lock:
            stream = self.device.stream()
            capturing = self.device.driver.is_capturing(stream)
            if not capturing:
                self._follow(stream)
            memory = self.device.memory(stream, self._workspace_bytes, capturing)
            # on CUDA, PyTorch keeps the memory of a capture with its graph
            if capturing and self.device.torch_device.type != "cuda":
                self._captured.append(memory)
            if self._ticket is not None:
                self._ticket.value = memory.ticket.data_ptr()
            workspace = memory.workspace
            if self._library.lsq_list_run(
                self._list,
                ctypes.c_void_p(stream),
                ctypes.c_void_p(workspace.data_ptr()),
                ctypes.c_int64(workspace.numel()),
                self.device.message,
                ctypes.c_int64(runtime.MESSAGE_BYTES),
            ):
                memory.clear()
                raise RuntimeError(self.device.message.value.decode(errors="replace"))

    def __del__(self) -> None:
        if hasattr(self, "_list"):
            self._library.lsq_list_destroy(self._list)

    def _follow(self, stream: int) -> None:
        """If the last run was on another stream, wait for it; tell PyTorch which stream uses the
        tensors."""
        if stream == self._stream:
            return
        self.device.driver.follow(self._stream, stream)
        self._stream = stream
        if stream not in self._recorded:
            self._recorded.add(stream)
            for held in self._held:
                for tensor in held():
                    self.device.record(tensor)

    def _word(self, value: bytes) -> int:
        """Return the address of 8 bytes with this value, which live as long as the list."""
        self._memory.append(ctypes.c_uint64.from_buffer_copy(value))
        return ctypes.addressof(self._memory[-1])

    def _pointer(self, tensor: torch.Tensor, addresses: Addresses, what: str) -> int:
        """Return the address of a word that holds the tensor's address in every run."""
        word, offset = addresses.address(tensor, what)
        if word is None:
            return self._word(struct.pack("<q", offset))
        if not offset:
            return word
        shifted = self._word(bytes(8))
        self._library.lsq_list_add_shift(
            self._list, ctypes.c_void_p(word), ctypes.c_int64(offset), ctypes.c_void_p(shifted)
        )
        return shifted

    def _parameter(self, value, addresses: Addresses, what: str) -> int:
        """Return the address of a kernel's parameter: a struct, or 8 bytes (a pointer or a
        number)."""
        if value is TICKET:
            if self._ticket is None:
                self._ticket = ctypes.c_uint64()
            return ctypes.addressof(self._ticket)
        if isinstance(value, torch.Tensor):
            check(
                value.is_contiguous(),
                f"{what}: a tensor with strides {value.stride()} is not contiguous; call"
                " .contiguous()",
            )
            return self._pointer(value, addresses, what)
        if hasattr(value, "pack"):
            return ctypes.addressof(addresses.struct(value, what))
        return self._word(
            struct.pack("<fxxxx", value)
            if isinstance(value, float)
            else struct.pack("<q", value or 0)
        )

    def _add_launch(self, entry: Launch, part: Part) -> None:
        what = _named(part.title, entry.kernel)
        function = self.device.function(entry.kernel, entry.shared)
        values = [self._parameter(value, part.addresses, what) for value in entry.arguments]
        self._library.lsq_list_add_launch(
            self._list,
            what.encode(),
            ctypes.c_void_p(function),
            (ctypes.c_int64 * 6)(*entry.grid, *entry.block),
            ctypes.c_int64(entry.shared),
            (ctypes.c_void_p * len(values))(*values),
            ctypes.c_int64(len(values)),
        )

    def _add_product(self, entry: Product, part: Part) -> None:
        prepared = self._products.prepare(entry)
        what = _named(part.title, prepared)
        operands = entry.a, entry.b, entry.out
        words = [self._pointer(tensor, part.addresses, what) for tensor in operands]
        self._workspace_bytes = max(self._workspace_bytes, prepared.algorithm.workspace_bytes)
        self._library.lsq_list_add_product(
            self._list,
            what.encode(),
            ctypes.c_void_p(prepared.native.address),
            *map(ctypes.c_void_p, words),
        )


def _named(title: str, entry) -> str:
    return f"{title}: {entry}" if title else str(entry)
