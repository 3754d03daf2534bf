"""What others' code keeps for the backward pass of a step, beside the planned memory of lsq's
modules."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

MOST = 5
"""Classes of modules that are named."""


@contextmanager
def counting_kept(model: nn.Module, found: Counter) -> Iterator[None]:
    """Add to `found` the bytes that others' code keeps for the backward pass: class of the
    innermost module -> bytes.

    For a rehearsed step, in which lsq's layers keep nothing. Every storage counts once, parameters
    do not.
    """
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    inside: list[str] = []
    held = []  # else a storage that is freed could lend its address to the next

    def enter(module: nn.Module, inputs: tuple) -> None:
        inside.append(type(module).__name__)

    def leave(module: nn.Module, inputs: tuple, outputs: object) -> None:
        inside.pop()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            held.append(tensor)
            # what a rehearsal makes has one value in memory
            whole = tensor.numel() * tensor.element_size()
            found[inside[-1] if inside else "the loss"] += max(storage.nbytes(), whole)
        return tensor

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def described(outside: Mapping[str, int]) -> str:
    """In words."""
    if not outside:
        return "nothing is kept"
    parts = [f"{name} {size / 2**20:.1f}" for name, size in Counter(outside).most_common(MOST)]
    others = f", {len(outside) - MOST} others" if len(outside) > MOST else ""
    total = sum(outside.values()) / 2**20
    return f"{total:.1f} MiB are kept by modules that are not lsq's ({', '.join(parts)}{others})"
