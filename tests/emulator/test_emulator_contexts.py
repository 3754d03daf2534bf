"""Contexts of the emulated devices: each thread has a stack of its own, and nothing runs without
one."""

import ctypes
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.emulator.emulated import CudaError, Driver, Module, memory

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def in_a_fresh_thread(work):
    """What it returns or raises there."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_fresh_thread_has_no_context():
    module, out = Module("sound.cu"), memory(1)
    module.function("places")
    for call in (
        lambda: module.launch("places", 1, 32, out),
        lambda: module.driver("cuModuleLoadData", None, b""),
    ):
        with pytest.raises(CudaError, match="no context is current in this thread") as caught:
            in_a_fresh_thread(call)
        assert caught.value.result == 201


def test_contexts_are_a_stack_and_belong_to_devices():
    driver = Driver()
    first, second, found = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(first), 0)
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(second), 1)
    driver("cuCtxPushCurrent_v2", second)
    driver("cuCtxGetCurrent", ctypes.byref(found))
    assert found.value == second.value != first.value
    driver("cuCtxPopCurrent_v2", ctypes.byref(found))
    driver("cuCtxGetCurrent", ctypes.byref(found))
    assert found.value == first.value
    with pytest.raises(CudaError, match="INVALID_DEVICE"):
        driver("cuDevicePrimaryCtxRetain", ctypes.byref(found), 2)
