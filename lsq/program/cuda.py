"""Generic functions of operations for a GPU.

A file beside an operation's file registers them: lsq.ops.project_cuda for lsq.ops.project. It is
imported at the first call for one of its operations, so that CPU programs load none.
"""

import functools
import importlib
from collections.abc import Callable, Sequence

import torch

from lsq.native.launch import Launch, Product

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of scratch memory."""


def _from_file_beside(default: Callable) -> Callable:
    """Make a generic function of an operation, with `default` where its file registers nothing."""

    def dispatch(operation, *arguments):
        _load(type(operation).__module__ + "_cuda")
        found = generic.dispatch(type(operation))
        return (default if found is dispatch else found)(operation, *arguments)

    generic = functools.singledispatch(functools.wraps(default)(dispatch))
    return generic


@functools.cache
def _load(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise


@_from_file_beside
def launches(operation, *scratch: torch.Tensor) -> Launch | list[Launch | Product]:
    """Return the launches and products of Operation.cuda; one launch needs no list."""
    raise ValueError(f"operation {operation.name} has no CUDA implementation")


@_from_file_beside
def kernel_sums(operation) -> Sequence:
    """Return the sums over rows that kernels leave in parts (lsq.ops.sums_cuda.KernelSums)."""
    return ()


@_from_file_beside
def scratch_of(operation) -> Sequence[Spec]:
    return tuple(spec for sums in kernel_sums(operation) for spec in sums.scratch)
