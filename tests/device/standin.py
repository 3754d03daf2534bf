"""The device "standin" of PyTorch, and lsq's backend for it: kernels run in the emulator, on the
device's own memory.

Its memory is the host's, but its tensors do not mix with those of the CPU. To be loaded before the
first backward pass of a process, which starts a thread for each device that is known then.
"""

import contextlib
import ctypes
import sys
from collections.abc import Callable

import torch
from torch import nn

from lsq import emulator
from lsq.run import backends
from lsq.run.cuda import CUDA, emulated_device
from tests.device import build

NAME = "standin"
DEVICES = 2
PLACE = torch.device("privateuseone", 0)  # its name until it is loaded
Watcher = Callable[[int, str, int], None]
"""Is given LAUNCH, WAIT or FAULT (memory ended while in use), what it was, and the number of the
current stream."""
LAUNCH, WAIT, FAULT = 0, 1, 2
_C_WATCHER = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64)
_library: ctypes.CDLL | None = None
_watchers: list[Watcher] = []


def load() -> None:
    """Make the device known to PyTorch and to lsq.

    Raises:
        build.CannotBuild: there is no compiler, or no headers of PyTorch.
    """
    global _library
    if _library is not None:
        return
    _library = ctypes.CDLL(str(build.library()))
    _library.standin_open(str(emulator.build_driver()).encode())
    _library.standin_watch(_tell)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
    made: dict[torch.device, CUDA] = {}
    backends.MAKERS[NAME] = lambda device, activations: made.setdefault(
        (device, activations),
        CUDA(emulated_device(device=device), activations=activations or torch.float32),
    )


def on_host(x: torch.Tensor) -> torch.Tensor:
    """The same memory of a contiguous tensor as one of the CPU; for what stands beside PyTorch."""
    if not x.numel():
        return torch.empty(x.shape, dtype=x.dtype)
    memory = (ctypes.c_char * (x.numel() * x.itemsize)).from_address(x.data_ptr())
    return torch.frombuffer(memory, dtype=x.dtype).view(x.shape)


def moved(model: nn.Module, place: torch.device = PLACE) -> nn.Module:
    """`model` on the device; as on CUDA, and unlike model.to(), parameters that modules share stay
    shared."""
    named = [
        (module, name, p) for module in model.modules() for name, p in module._parameters.items()
    ]
    model.to(place)
    first = {}
    for module, name, before in named:
        if before is not None:
            module._parameters[name] = first.setdefault(id(before), module._parameters[name])
    return model


@contextlib.contextmanager
def watching(watcher: Watcher):
    """Within this context, tell `watcher` of everything that PyTorch launches on the device and
    waits for."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@_C_WATCHER
def _tell(what: int, name: bytes, stream: int) -> None:
    for watcher in tuple(_watchers):
        watcher(what, name.decode(), stream)


@contextlib.contextmanager
def ordered():
    """Within this context, uses of memory that no event orders raise RuntimeError; ends of memory
    do at its end."""
    faults = []
    _library.standin_order(1)
    try:
        with watching(lambda what, name, stream: faults.append(name) if what == FAULT else None):
            yield
    finally:
        _library.standin_order(0)
    if faults:
        raise RuntimeError("\n".join(faults))


# What PyTorch asks of torch.<device>

Stream = torch.Stream
Event = torch.Event


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return DEVICES


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device) -> None:
    torch.accelerator.set_device_index(device)


def current_stream(device=None) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def stream(given: torch.Stream) -> torch.Stream:
    return given


def synchronize(device=None) -> None:
    torch.accelerator.synchronize(device)


def device(given) -> torch.accelerator.device_index:
    return torch.accelerator.device_index(
        given if isinstance(given, int) else torch.device(given).index
    )


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    """There is nothing to begin; PyTorch 2.11 waits for no device that has not begun."""


def manual_seed_all(seed: int) -> None:
    for index in range(DEVICES):
        torch.Generator(torch.device(NAME, index)).manual_seed(seed)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16]
