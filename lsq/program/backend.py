"""The interface of backends."""

from collections.abc import Callable, Sequence

import torch

from lsq.program.operation import Operation, Spec

Call = tuple[Operation, Sequence[torch.Tensor]]
"""An operation on real tensors, and its scratch memory."""
SENT_ALIGNMENT = 16
"""Bytes to whose multiples the tensors begin that `Backend.send` sends together."""


class Backend:
    """A device that runs operations, and its demands on programs."""

    name: str
    """For people."""
    device: torch.device = torch.device("cpu")
    """Device of its tensors."""
    activations: torch.dtype = torch.float32
    """dtype of activations in programs; other floats are float32."""
    starts_scales: bool = False
    """One operation writes all scales of a pass at its beginning."""
    leaves_sums: bool = False
    """Operations leave sums over rows in parts, for one operation to finish at the end."""
    transposed_weights: bool = False
    """Int8 products that go back read codes of weights transposed, which come in then."""
    refillable: bool = False
    """What `prepare` made sees tensors that are put into its operations later."""
    packed_rows: int = 0
    """Up to so many rows, a product reads its weight as a packed format stores it."""
    packs_weights: bool = False
    """Decoding wants weights packed (lsq.ops.packed_project), not as plain codes."""
    multiplies_groups: bool = False
    """Products of int8 codes with scales of groups are fast (lsq.ops.grouped_product)."""
    few_sizes: bool = False
    """Preparing takes so long that batches should be filled up to one of a few sizes."""
    either_border: bool = False
    """Floats at the borders of a product may be float32 or bfloat16, whatever activations are."""
    seconds: dict[str, float] | None = None
    """Collects how long operations run, by name; see lsq.run.executor.profile."""

    def __deepcopy__(self, memo):
        return self  # a copy of a module runs where the module does

    def scratch(self, operation: Operation) -> Sequence[Spec]:
        """(shape, dtype) of what an operation, virtual or real, needs for itself while it runs
        here."""
        return ()

    def prepare(self, calls: Sequence[Call]) -> Callable[[], None]:
        """Return a function that runs `calls` one after another on their tensors. Raises
        ValueError: an operation cannot take these tensors here."""
        raise NotImplementedError

    def check(self, tensor: torch.Tensor, name: str) -> None:
        """Raise ValueError for a tensor that cannot be put into operations that were prepared with
        another one; the message begins with `name`."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def send(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Small tensors of the CPU on this device, aligned for kernels, in one copy without
        waiting."""
        if self.device.type == "cpu":
            return list(tensors)
        given = [tensor.contiguous() for tensor in tensors]
        sizes = [-(-tensor.nbytes // SENT_ALIGNMENT) * SENT_ALIGNMENT for tensor in given]
        staged = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=True)
        for tensor, part in zip(given, staged.split(sizes), strict=True):
            part[: tensor.nbytes].view(tensor.dtype).copy_(tensor.flatten())
        arrived = staged.to(self.device, non_blocking=True).split(sizes)
        return [
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, part in zip(given, arrived, strict=True)
        ]

    def run(self, operation: Operation) -> None:
        """Run one operation now, with fresh scratch memory. Raises ValueError: a tensor lies
        elsewhere, or is not what the operation takes here."""
        for tensor in (*operation.inputs, *operation.outputs):
            if tensor.device != self.device:
                raise ValueError(
                    f"{operation.name} was given a tensor on {tensor.device}, but runs on"
                    f" {self.device}; move it with .to()"
                )
        scratch = [self.allocate(*wanted) for wanted in self.scratch(operation)]
        self.prepare([(operation, scratch)])()
