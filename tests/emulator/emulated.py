"""Launches kernels of tests/emulator/kernels through the emulated driver.

Imports no torch: children start fast.
"""

import ctypes
from pathlib import Path

from lsq import emulator

FOLDER = Path(__file__).parent / "kernels"
ORDERS = (0, 1, 2, 77)

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]


def memory(count, kind=ctypes.c_float):
    """An array of zeros on the heap, with nothing after it, so that AddressSanitizer sees accesses
    beyond its end."""
    array = (kind * count).from_address(libc.malloc(ctypes.sizeof(kind) * count))
    ctypes.memset(array, 0, ctypes.sizeof(array))
    return array


class CudaError(Exception):
    """A driver function returned a failure."""

    def __init__(self, result, message):
        super().__init__(message)
        self.result = result


class Driver:
    """The emulated driver, in one order of threads; the context of a device becomes current."""

    def __init__(self, order=0, sanitize=False, device=0):
        self.library = ctypes.CDLL(str(emulator.build_driver(sanitize)))
        self.library.lsq_emulator_order(order)
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def __call__(self, name, *arguments):
        result = getattr(self.library, name)(*arguments)
        if result:
            message = ctypes.c_char_p()
            self.library.cuGetErrorString(result, ctypes.byref(message))
            raise CudaError(result, message.value.decode())


class Module:
    """The kernels of a file."""

    def __init__(self, source, order=0, sanitize=False, defines=(), device=0):
        self.driver = Driver(order, sanitize, device)
        self.handle = ctypes.c_void_p()
        image = emulator.compile_kernels(str(FOLDER / source), defines, sanitize)
        self.driver("cuModuleLoadData", ctypes.byref(self.handle), image)

    def function(self, name):
        found = ctypes.c_void_p()
        self.driver("cuModuleGetFunction", ctypes.byref(found), self.handle, name.encode())
        return found

    def launch(self, name, grid, block, *arguments, shared=0, stream=None):
        """Arrays and tensors go as pointers, whole numbers as int64 (addresses too), floats as
        float32; stream: its handle."""
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        grid, block = (
            (*size, 1, 1)[:3] if isinstance(size, tuple) else (size, 1, 1) for size in (grid, block)
        )
        given = LaunchConfiguration(grid, block, shared, stream)
        self.driver("cuLaunchKernelEx", ctypes.byref(given), self.function(name), pointers, None)


class LaunchConfiguration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


def _value(argument):
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    if hasattr(argument, "data_ptr"):
        argument = argument.data_ptr()
    return ctypes.c_int64(argument if isinstance(argument, int) else ctypes.addressof(argument))


def fails(message, result=None):
    """A block that must end with a CudaError of this message, and of this result if it is given."""
    import pytest

    check = {"check": lambda error: error.result == result} if result is not None else {}
    return pytest.raises(CudaError, match=message, **check)
