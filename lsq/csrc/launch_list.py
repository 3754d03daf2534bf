"""Launches and products with their tensors, turned into a list that C++ replays with one call."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from lsq.csrc.launch import TICKET, Launch, Product, check, launch
from lsq.csrc.runtime import Replay, address, argument

ALIGNMENT = 16
"""Bytes to whose multiples the addresses of tensors must be aligned."""
WORKSPACE_ALIGNMENT = 256
SLOTS_AT_ONCE = 8
"""Slots that one launch of lsq_store_slots writes."""


class ReadyProduct(Protocol):
    """A product with its algorithm, e.g. lsq.gemm.cublaslt.ChosenProduct."""

    address: int
    """The handle that the launcher runs."""
    workspace_bytes: int

    def __str__(self) -> str: ...


class Products(Protocol):
    """What finds an algorithm for a product, e.g. lsq.gemm.cublaslt.Products."""

    def prepare(self, product: Product) -> ReadyProduct:
        """The product, ready to run.

        Raises:
            ValueError: the operands cannot be multiplied.
            RuntimeError: the library has no algorithm for them.
        """


class LaunchList:
    """Launches and products that `run` replays with one call into C++, on PyTorch's current stream.

    The list keeps the tensors of its entries alive and works on their addresses, except for those named in `slots` and
    `numbers`, which every run gives anew. Between two runs on different streams, the caller must synchronise.

    Args:
        device: the lsq.csrc.device.Device where it runs.
        entries: what an operation's `cuda` returns, or several of these one after another.
        slots: name -> a tensor among the arguments of launches (not of products), whose address each run gives anew.
        numbers: name -> a tensor [1] of int64 or float32 among the arguments, in whose place each run gives a number.
        title: what to call the list in errors.
        forget: keep no tensor alive, but work on whatever lies at the same addresses later.

    Raises:
        ValueError: a tensor lies elsewhere, is not contiguous or not aligned, or a slot is not among the arguments.
        RuntimeError: a kernel does not compile or load, or a product has no algorithm.
    """

    def __init__(
        self, device, entries: Sequence[Launch | Product], *, slots: Mapping[str, torch.Tensor] | None = None,
        numbers: Mapping[str, torch.Tensor] | None = None, title: str = "", forget: bool = False,
    ):
        self.device = device
        self._entries = list(entries)
        self._examples = {**(slots or {}), **(numbers or {})}
        self._numbers = set(numbers or {})
        names = list(self._examples)
        self._slots = torch.zeros(max(1, len(names)), dtype=torch.int64, device=device.place)
        self._slot_of = {
            tensor.data_ptr(): self._slots.data_ptr() + 8 * number + (name not in self._numbers)
            for number, (name, tensor) in enumerate(self._examples.items())
        }
        self._used: set[int] = set()
        self._tickets = self._new_tickets()
        prepared = [device.products.prepare(entry) for entry in self._entries if isinstance(entry, Product)]
        largest = max((product.workspace_bytes for product in prepared), default=0)
        self._workspace = aligned_workspace(largest, device.place)
        self._replay = Replay(device.driver)
        writers = self._slot_writers(len(names))
        for entry in [*writers, *self._entries]:
            if isinstance(entry, Launch):
                self._add_launch(entry, title)
            else:
                self._add_product(entry, prepared.pop(0), title)
        self._replay.close(len(writers))
        if forget:
            self._entries = []
        unused = [name for name, tensor in self._examples.items() if tensor.data_ptr() not in self._used]
        check(not unused, f"no launch of the list has {', '.join(unused)} among its arguments")

    def run(self, **values: torch.Tensor | int | float) -> None:
        """Launch everything on PyTorch's current stream. Without values, slots keep what they had.

        Raises:
            ValueError: values are missing, or a tensor's shape, dtype or place is not that of its example.
            RuntimeError: a launch failed; the message names the kernel or product and its sizes.
        """
        self._call(self._slot_values(values) if values else None)

    def store(self, **values: torch.Tensor | int | float) -> None:
        """Only write the slots: what to do before a captured graph of this list is replayed."""
        self._call(self._slot_values(values), work=False)

    def _call(self, values: bytes | None, work: bool = True) -> None:
        try:
            self._replay.run(self.device.stream(), values, work)
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # a GPU whose context is lost takes no more work
                self._ticket_memory.zero_()  # a kernel that did not finish leaves them as they are
            raise

    def _slot_values(self, values: Mapping) -> bytes:
        check(
            set(values) == set(self._examples),
            f"a run was given {sorted(values)}; this list needs {sorted(self._examples)}, or nothing at all",
        )
        found = []
        for name, example in self._examples.items():
            value = values[name]
            if name in self._numbers:
                found.append(argument(float(value) if example.dtype == torch.float32 else int(value)))
                continue
            check(
                value.shape == example.shape and value.dtype == example.dtype,
                f"{name} is {value.dtype} {list(value.shape)}; the list was made for {example.dtype} "
                f"{list(example.shape)}",
            )
            found.append(address(self._address(value, name)))
        return b"".join(found)

    def _slot_writers(self, count: int) -> list[Launch]:
        def writer(first: int) -> Launch:
            values = (0,) * SLOTS_AT_ONCE
            arguments = (self._slots, first, min(SLOTS_AT_ONCE, count - first), *values)
            return launch("slots.cu", "lsq_store_slots", *arguments, grid=1, block=32)

        return [writer(first) for first in range(0, count, SLOTS_AT_ONCE)]

    def _new_tickets(self):
        launches = [entry for entry in self._entries if isinstance(entry, Launch)]
        wanted = sum(value is TICKET for entry in launches for value in entry.arguments)
        self._ticket_memory = torch.zeros(2 * max(1, wanted), dtype=torch.int32, device=self.device.place)
        first = self._ticket_memory.data_ptr()
        return iter(range(first, first + 8 * wanted, 8))

    def _address(self, tensor: torch.Tensor, what: str) -> int:
        return tensor_address(tensor, self.device.place, what)

    def _argument(self, value, what: str) -> bytes:
        if value is None:
            return address(0)
        if value is TICKET:
            return address(next(self._tickets))
        if isinstance(value, torch.Tensor):
            return address(self._pointer(value, what))
        return value.pack(lambda tensor: self._pointer(tensor, what)) if hasattr(value, "pack") else argument(value)

    def _pointer(self, tensor: torch.Tensor, what: str) -> int:
        found = contiguous_address(tensor, self.device.place, what)
        self._used.add(found)
        return self._slot_of.get(found, found)

    def _add_launch(self, entry: Launch, title: str) -> None:
        what = f"{title}: {entry.kernel}" if title else str(entry.kernel)
        function = self.device.function(entry.kernel, entry.shared)
        values = [self._argument(value, what) for value in entry.arguments]
        self._replay.add_launch(what, function, entry.grid, entry.block, entry.shared, values)

    def _add_product(self, entry: Product, prepared: ReadyProduct, title: str) -> None:
        what = f"{title}: {prepared}" if title else str(prepared)
        a, b, out = (self._address(tensor, what) for tensor in (entry.a, entry.b, entry.out))
        vector = isinstance(entry.alpha, torch.Tensor)
        alphas = self._address(entry.alpha, what) if vector else None
        slots = self._slot_of.keys() & {a, b, out, alphas}
        check(not slots, f"{what}: an operand is a slot; products need fixed addresses, so copy it first")
        alpha = 1.0 if vector else float(entry.alpha)
        memory = self._workspace.data_ptr(), self._workspace.numel()
        self._replay.add_product(what, prepared.address, a, b, out, alphas, alpha, memory)


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
