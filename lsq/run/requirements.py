"""What a GPU needs, so that operations run on it: looked at without touching it."""

import torch

from lsq.native import compiler
from lsq.native.products import ProductLibrary, find_cublaslt
from lsq.native.runtime import Driver


def require_gpu(index: int = 0) -> tuple[str, Driver]:
    """(architecture that kernels are compiled for, driver) of a GPU that PyTorch sees, by its
    number.

    No context is made, so that a process may ask about a GPU that another one will use.

    Raises:
        RuntimeError: there is no such GPU, no driver or compiler, or its driver is older than the
            compiler.
        ValueError: the GPU is too old for the kernels.
    """
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise RuntimeError(
            f"there is no GPU {index} that PyTorch can use (it sees {torch.cuda.device_count()});"
            f" {compiler.remedy()}, "
            "or train on the CPU"
        )
    target = compiler.architecture(torch.cuda.get_device_capability(index))
    driver = Driver("libcuda.so.1", index)
    compiler.check_driver(driver.version)
    return target, driver


def gpu_fault(index: int = 0) -> str | None:
    """Why layers cannot run on that GPU, in a sentence with its remedy; None: they can."""
    try:
        require_gpu(index)
        ProductLibrary(find_cublaslt())
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None
