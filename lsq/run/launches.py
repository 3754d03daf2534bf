"""What operations launch, with everything read through their structs, so that their tensors may
move between two runs.

What an operation launches depends on shapes alone. So it is asked on tensors without memory, each
with a storage of its
own: by that an argument is known as a field or as scratch memory, also where it is a part of one.
"""

from collections.abc import Iterable, Sequence

import torch

from lsq.native.addresses import StructAddresses, contiguous_address
from lsq.native.launch_list import Part
from lsq.program.declare import address_words
from lsq.program.operation import Operation


def part_of(
    operation: Operation, scratch: Sequence[torch.Tensor], place: torch.device, *, hold: bool = True
) -> Part:
    """The launches of an operation on real tensors, for a list (lsq.native.launch_list.LaunchList).

    Args:
        operation: its struct, Operation.packed, is read at every run.
        scratch: tensors for itself, which stay; where their memory lies is looked up when addresses
            `follow`.
        place: the device where they must lie.
        hold: whether the list keeps the operation and its memory.

    Raises:
        ValueError: the operation cannot take these tensors.
    """

    def held() -> Iterable[torch.Tensor]:
        return (*operation.inputs, *operation.outputs, *scratch)

    bound, memory = operation.bind(_without_memory), [_without_memory(tensor) for tensor in scratch]
    addresses = StructAddresses(bound, operation.packed, held if hold else tuple)
    words = address_words(type(operation))
    for leaf in operation.leaves():
        tensor = leaf.of(operation)
        if tensor is not None:
            contiguous_address(tensor, place, f"{operation.name}.{leaf.name}")
            addresses.know_field(leaf.of(bound), words[leaf.path])
    for tensor, known in zip(scratch, memory, strict=True):
        contiguous_address(tensor, place, f"scratch memory of {operation.name}")
        addresses.know_scratch(known, tensor)
    return Part(entries=bound.cuda(*memory), addresses=addresses, title=operation.name)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
