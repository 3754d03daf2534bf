"""Addresses of operands of launches and products: fixed, or read through words that may change."""

import ctypes
from collections.abc import Callable, Iterable

import torch

from lsq.native import loader
from lsq.native.launch import check

ALIGNMENT = 16
"""Bytes to whose multiples the addresses of tensors must be aligned."""


class Addresses:
    """Tensors at fixed addresses on a device, and structs that are made of them."""

    def __init__(self, device: torch.device):
        self._device = device
        self.memory: list[ctypes.Array] = []
        """Memory that must live as long as the list that reads it."""
        self._held: list[torch.Tensor] = []

    def struct(self, operation, what: str) -> ctypes.Array:
        """The struct of an operation, 8 bytes at a time. `what` begins the message of an error."""

        def address(tensor: torch.Tensor) -> int:
            self._held.append(tensor)
            return contiguous_address(tensor, self._device, what)

        self.memory.append(loader.words(operation.pack(address)))
        return self.memory[-1]

    def address(self, tensor: torch.Tensor, what: str) -> tuple[int | None, int]:
        """(address of a word, offset): the tensor lies `offset` bytes after what stands there; no
        word: at `offset`."""
        self._held.append(tensor)
        return None, tensor_address(tensor, self._device, what)

    def held(self) -> Iterable[torch.Tensor]:
        """Tensors that live as long as the list that reads them."""
        return self._held


class StructAddresses(Addresses):
    """One operation whose struct, and through it its operands, are read at every run."""

    def __init__(self, operation, struct: ctypes.Array, held: Callable[[], Iterable[torch.Tensor]]):
        self._operation, self._struct = operation, struct
        self.held = held
        self.memory = [struct]
        self._words: dict[int, int] = {}
        self._scratch: list[tuple[ctypes.Array, torch.Tensor]] = []

    def know_field(self, tensor: torch.Tensor, number: int) -> None:
        """A tensor with the storage of `tensor` lies where word `number` of the struct says."""
        self._words[_storage(tensor)] = ctypes.addressof(self._struct) + 8 * number

    def know_scratch(self, tensor: torch.Tensor, real: torch.Tensor) -> None:
        """A tensor with the storage of `tensor` lies where `real` lies at every `follow`."""
        self.memory.append((ctypes.c_uint64 * 1)(real.data_ptr()))
        self._words[_storage(tensor)] = ctypes.addressof(self.memory[-1])
        self._scratch.append((self.memory[-1], real))

    def follow(self) -> None:
        """Scratch memory may lie elsewhere by now."""
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
    """The address of a tensor for a kernel on `device`; `what` begins the message of a
    ValueError."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{what}: a tensor with strides {tensor.stride()} is not contiguous; call .contiguous()"
        )
    return tensor_address(tensor, device, what)


def tensor_address(tensor: torch.Tensor, device: torch.device, what: str) -> int:
    """The address of a tensor of any strides. Every border of a pass comes here: no message is made
    ahead."""
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
