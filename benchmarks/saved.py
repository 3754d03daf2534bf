"""Bytes that a forward pass keeps for its backward pass."""

from collections import Counter
from collections.abc import Callable, Iterable

import torch


def saved_tensors(forward: Callable[[], torch.Tensor], parameters: Iterable[torch.Tensor]) -> Counter:
    """What autograd keeps when `forward` runs: every storage once, parameters left out.

    Args:
        forward: returns the tensor on which backward() would be called.
        parameters: tensors that exist anyway; views of them count nothing.

    Returns:
        "dtype [shape]" -> bytes, for the tensor that first brought each storage.
    """
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: Counter = Counter()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            kept[f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        root = forward()
    del root  # held until here: a storage that is freed could lend its address to the next
    return kept
