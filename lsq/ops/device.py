"""Runs the CUDA implementations of operations, one at a time: on a GPU, or in the emulator."""

import functools

import torch

from lsq.csrc.device import Device, emulated_device, gpu_device
from lsq.csrc.launch_list import LaunchList
from lsq.gemm import lookup
from lsq.gemm.cublaslt import Products, tuned_products
from lsq.ops.registry import OpDefinition


@functools.cache
def emulated(sanitize: bool = False) -> Device:
    """The emulator; `sanitize`: see lsq.csrc.emulator."""
    return emulated_device(lambda library: Products(torch.device("cpu"), library=str(library)), sanitize=sanitize)


@functools.cache
def gpu(index: int = 0) -> Device:
    """The GPU of that number; raises what lsq.csrc.device.gpu_device does."""
    return gpu_device(index, lambda: tuned_products(torch.device("cuda", index), lookup.table("cuda"))[0])


def scratch_for(definition: OpDefinition, inputs, attributes, place: torch.device) -> list[torch.Tensor]:
    """Scratch memory of a CUDA implementation for these inputs."""
    wanted = definition.cuda_scratch(*inputs, **attributes) if definition.cuda_scratch else ()
    return [torch.empty(shape, dtype=dtype, device=place) for shape, dtype in wanted]


def prepare(device: Device, definition: OpDefinition, inputs, outputs, **attributes) -> LaunchList:
    """The launches of one operation on allocated outputs, ready to run.

    Raises:
        ValueError: the operation has no CUDA implementation, or cannot take these shapes.
    """
    if definition.cuda is None:
        raise ValueError(f"operation {definition.name} has no CUDA implementation")
    scratch = scratch_for(definition, inputs, attributes, device.place)
    return device.list(definition.cuda(*inputs, *outputs, *scratch, **attributes), title=definition.name)
