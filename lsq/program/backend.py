"""The interface of backends."""

from collections.abc import Callable, Sequence

import torch

from lsq.program.operation import Operation, Spec

Call = tuple[Operation, Sequence[torch.Tensor]]
"""An operation on real tensors, and its scratch memory."""
SENT_ALIGNMENT = 16
"""Alignment in bytes of the tensors that `Backend.send` copies together."""


class Backend:
    """A device that runs operations, and its demands on programs."""

    name: str
    """Name in messages and options."""
    device: torch.device = torch.device("cpu")
    """Device of its tensors."""
    activations: torch.dtype = torch.float32
    """dtype of activations in programs; other floats are float32."""
    starts_scales: bool = False
    """Whether one operation writes all scales of a pass at its beginning."""
    leaves_sums: bool = False
    """Whether operations leave partial sums over rows, which one operation adds up at the end."""
    transposed_weights: bool = False
    """Whether int8 products of input gradients read transposed codes, as further inputs."""
    column_multiple: int = 1
    """What the inputs of an int8 product must be a multiple of."""
    refillable: bool = False
    """Whether a prepared pass uses tensors that are put into its operations later."""
    packed_rows: int = 0
    """Most rows with which a product reads its weight as a packed format stores it."""
    packs_weights: bool = False
    """Whether decoding reads packed weights (lsq.ops.packed_project) instead of plain codes."""
    multiplies_groups: bool = False
    """Whether int8 products with a scale for each group are fast (lsq.ops.grouped_product)."""
    few_sizes: bool = False
    """Whether batches are padded to one of a few sizes, because preparing a pass takes long."""
    either_border: bool = False
    """Whether a product reads and writes float32 and bfloat16 alike, whatever `activations` is."""
    seconds: dict[str, float] | None = None
    """Seconds that operations took on any backend, by name: lsq.run.executor.profile sets it here,
    on the class."""

    def __deepcopy__(self, memo):
        return self  # a copy of a module runs where the module does

    def scratch(self, operation: Operation) -> Sequence[Spec]:
        """Return shape and dtype of the scratch memory that an operation needs here. The tensors of
        the operation may be virtual."""
        return ()

    def prepare(self, calls: Sequence[Call]) -> Callable[[], None]:
        """Return a function that runs `calls` one after another on their tensors. Raises
        ValueError: an operation cannot take these tensors here."""
        raise NotImplementedError

    def check(self, tensor: torch.Tensor, name: str) -> None:
        """Raise ValueError unless `tensor` can replace another one in prepared operations. `name`
        begins the message."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def send(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy small CPU tensors to this device at once, aligned for kernels, without waiting."""
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
        """Run one operation now, with fresh scratch memory. Raises ValueError: a tensor is on
        another device, or the operation cannot take it here."""
        for tensor in (*operation.inputs, *operation.outputs):
            if tensor.device != self.device:
                raise ValueError(
                    f"{operation.name} was given a tensor on {tensor.device}, but runs on"
                    f" {self.device}; move it with .to()"
                )
        scratch = [self.allocate(*wanted) for wanted in self.scratch(operation)]
        self.prepare([(operation, scratch)])()
