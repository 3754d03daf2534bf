"""The interface of backends."""

from collections.abc import Callable, Sequence

import torch

from lsq.program.operation import Operation, Spec

Call = tuple[Operation, Sequence[torch.Tensor]]
"""An operation on real tensors, and its scratch memory."""
SENT_ALIGNMENT = 16
"""Bytes to whose multiples the tensors begin that `Backend.send` sends together."""


class Backend:
    """Where operations run.

    Attributes:
        name: for people.
        place: the device whose tensors it works on.
        activations: the dtype of activations in programs that are built for it; other floats are
            float32.
        starts_scales: whether an operation writes all scales of a pass at its beginning.
        leaves_sums: whether operations leave sums over rows in parts, for one operation to finish
            at the end of a pass.
        transposed_weights: whether the int8 products that go back read codes of weights transposed,
            which come in then.
        refillable: whether what `prepare` made sees tensors that are put into its operations later.
        packed_rows: up to how many rows a product reads its weight as a packed format stores it,
            instead of as codes.
        packs_weights: whether decoding wants weights packed (lsq.ops.packed_project), not as plain
            codes.
        multiplies_groups: whether products of int8 codes with scales of groups are fast
            (lsq.ops.grouped_product).
        either_border: whether floats at the borders of a product may be float32 or bfloat16,
            whatever activations are.
        few_sizes: whether preparing takes so long that batches should be filled up to one of a few
            sizes.
    """

    name: str
    place: torch.device = torch.device("cpu")
    activations: torch.dtype = torch.float32
    starts_scales: bool = False
    leaves_sums: bool = False
    transposed_weights: bool = False
    refillable: bool = False
    packed_rows: int = 0
    packs_weights: bool = False
    multiplies_groups: bool = False
    few_sizes: bool = False
    either_border: bool = False

    def __deepcopy__(self, memo):
        return self  # a copy of a module runs where the module does

    def scratch(self, operation: Operation) -> Sequence[Spec]:
        """(shape, dtype) of what an operation, virtual or real, needs for itself while it runs
        here."""
        return ()

    def prepare(self, calls: Sequence[Call]) -> Callable[[], None]:
        """Return a function that runs `calls` one after another on their tensors.

        Raises:
            ValueError: an operation cannot take these tensors here.
        """
        raise NotImplementedError

    def check(self, tensor: torch.Tensor, name: str) -> None:
        """Refuse a tensor that cannot be put into operations that were prepared with another one.

        Raises:
            ValueError: it lies elsewhere, or is not aligned; the message begins with `name`.
        """

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Fresh memory."""
        return torch.empty(shape, dtype=dtype, device=self.place)

    def send(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Small tensors of the CPU on this device, aligned for kernels, in one copy that nobody
        waits for."""
        if self.place.type == "cpu":
            return list(tensors)
        given = [tensor.contiguous() for tensor in tensors]
        sizes = [-(-tensor.nbytes // SENT_ALIGNMENT) * SENT_ALIGNMENT for tensor in given]
        staged = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=True)
        for tensor, place in zip(given, staged.split(sizes), strict=True):
            place[: tensor.nbytes].view(tensor.dtype).copy_(tensor.flatten())
        arrived = staged.to(self.place, non_blocking=True)
        return [
            place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, place in zip(given, arrived.split(sizes), strict=True)
        ]

    def run(self, operation: Operation) -> None:
        """Run one operation now, with fresh scratch memory.

        Raises:
            ValueError: a tensor lies elsewhere, or is not what the operation takes here.
        """
        for tensor in (*operation.inputs, *operation.outputs):
            if tensor.device != self.place:
                raise ValueError(
                    f"{operation.name} was given a tensor on {tensor.device}, but runs on"
                    f" {self.place}; move it "
                    "with .to()"
                )
        scratch = [self.allocate(*wanted) for wanted in self.scratch(operation)]
        self.prepare([(operation, scratch)])()
