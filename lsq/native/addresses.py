"""Addresses of the operands of launches and products: fixed, or read from memory in every run."""

import ctypes
from collections.abc import Callable, Iterable

import torch

from lsq.native import loader
from lsq.native.launch import check

ALIGNMENT = 16
"""Bytes; the address of a tensor must be a multiple."""


class Addresses:
    """Tensors at fixed addresses on a device, and structs made from them."""

    def __init__(self, device: torch.device):
        self._device = device
        self.memory: list[ctypes.Array] = []
        """Memory that must live as long as the list that reads it."""
        self._held: list[torch.Tensor] = []

    def struct(self, operation, what: str) -> ctypes.Array:
        """Return the struct of an operation in words of 8 bytes. `what` begins error messages."""

        def address(tensor: torch.Tensor) -> int:
            self._held.append(tensor)
            return contiguous_address(tensor, self._device, what)

        self.memory.append(loader.words(operation.pack(address)))
        return self.memory[-1]

    def address(self, tensor: torch.Tensor, what: str) -> tuple[int | None, int]:
        """Return (address of a word, offset): the tensor lies `offset` bytes after the address in
        the word. If there is no word (None), `offset` is the tensor's address."""
        self._held.append(tensor)
        return None, tensor_address(tensor, self._device, what)

    def held(self) -> Iterable[torch.Tensor]:
        """Return the tensors that must live as long as the list that reads them."""
        return self._held


class StructAddresses(Addresses):
    """Addresses that are read from the struct of one operation in every run."""

    def __init__(self, operation, struct: ctypes.Array, held: Callable[[], Iterable[torch.Tensor]]):
        self._operation, self._struct = operation, struct
        self.held = held
        self.memory = [struct]
        self._words: dict[int, int] = {}
        self._scratch: list[tuple[ctypes.Array, torch.Tensor]] = []

    def know_field(self, tensor: torch.Tensor, number: int) -> None:
        """Note that word `number` of the struct holds the address of the storage of `tensor`."""
        self._words[_storage(tensor)] = ctypes.addressof(self._struct) + 8 * number

    def know_scratch(self, tensor: torch.Tensor, real: torch.Tensor) -> None:
        """Note that the storage of `tensor` stands for the scratch memory `real`."""
        self.memory.append((ctypes.c_uint64 * 1)(real.data_ptr()))
        self._words[_storage(tensor)] = ctypes.addressof(self.memory[-1])
        self._scratch.append((self.memory[-1], real))

    def follow(self) -> None:
        """Read the addresses of scratch memory again: it may have moved."""
        for word, real in self._scratch:
            word[0] = real.data_ptr()

    def struct(self, operation, what):
        check(
            operation is self._operation,
            f"{what}: the launch is given another operation than its own",
        )
        return self._struct

    def address(self, tensor, what):
        word = self._words.get(_storage(tensor))
        check(
            word is not None,
            f"{what}: an operand is neither a field of the operation nor its scratch memory",
        )
        return word, tensor.storage_offset() * tensor.element_size()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def contiguous_address(tensor: torch.Tensor, device: torch.device, what: str) -> int:
    """Return the address of a contiguous tensor for a kernel on `device`. `what` begins error
    messages. Raises ValueError: it is not contiguous, or as `tensor_address`."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{what}: a tensor with strides {tensor.stride()} is not contiguous; call .contiguous()"
        )
    return tensor_address(tensor, device, what)


def tensor_address(tensor: torch.Tensor, device: torch.device, what: str) -> int:
    """Return the address of a tensor with any strides. Raises ValueError: it lies on another
    device, or is not aligned. Every pass calls this, so messages are made for errors alone."""
    if tensor.device != device:
        raise ValueError(
            f"{what}: a tensor lies on {tensor.device}, but this list runs on {device}; move it"
            " with .to()"
        )
    found = tensor.data_ptr()
    if found % ALIGNMENT:
        raise ValueError(
            f"{what}: a tensor begins {found % ALIGNMENT} bytes after a multiple of {ALIGNMENT};"
            " copy it with .clone()"
        )
    return found
