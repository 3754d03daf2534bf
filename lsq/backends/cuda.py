"""A GPU, or the emulator of one: lists of launches that one call replays."""

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from lsq.csrc import device
from lsq.csrc.device import Device
from lsq.csrc.launch_list import LaunchList
from lsq.gemm import lookup
from lsq.gemm.cublaslt import Products, tuned_products
from lsq.program.backend import Backend, Call
from lsq.program.operation import Operation, Spec

KEPT = 1024
"""Lists that are kept for calls on the same memory; those used longest ago are dropped."""


@functools.cache
def emulated_device(sanitize: bool = False) -> Device:
    """The emulator; `sanitize`: see lsq.csrc.emulator."""
    return device.emulated_device(
        lambda library: Products(torch.device("cpu"), library=str(library)), sanitize=sanitize
    )


@functools.cache
def gpu(index: int = 0) -> Device:
    """The GPU of that number; raises what lsq.csrc.device.gpu_device does."""
    return device.gpu_device(index, lambda: tuned_products(torch.device("cuda", index), lookup.table("cuda"))[0])


class CUDA(Backend):
    """Runs what `Operation.cuda` returns on a device.

    Args:
        target: the device.
        activations: the dtype of activations in programs: float32, bfloat16 or float16.
        kept: lists that `run` keeps.
    """

    def __init__(self, target: Device, *, activations: torch.dtype = torch.float32, kept: int = KEPT):
        self.device = target
        self.activations = activations
        self.name, self.place = target.name, target.place
        self._most = kept
        self._kept: OrderedDict[tuple, LaunchList] = OrderedDict()
        self._lock = threading.Lock()

    def scratch(self, operation: Operation) -> Sequence[Spec]:
        return operation.cuda_scratch()

    def prepare(self, calls: Sequence[Call]) -> Callable[[], None]:
        entries = [entry for operation, scratch in calls for entry in operation.cuda(*scratch)]
        return self.device.list(entries, title=", ".join(dict.fromkeys(one.name for one, _ in calls))).run

    def run(self, operation: Operation) -> None:
        """Run one operation now, on the current stream; the caller keeps its tensors until it is done.

        Launches that need no scratch are kept for calls on the same memory: buckets of gradients and their messages lie
        at the same addresses in every step. What is kept knows addresses, shapes and dtypes, and holds no tensor.
        Threads may share it.
        """
        with torch.cuda.device(self.place) if self.place.type == "cuda" else contextlib.nullcontext():
            if self.scratch(operation):
                super().run(operation)
            else:
                self._list_for(operation).run()

    def _list_for(self, operation: Operation) -> LaunchList:
        tensors = (leaf.of(operation) for leaf in operation.leaves())
        described = (None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors)
        key = type(operation), *described, *operation.attributes().items()
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self.device.list(operation.cuda(), title=operation.name, forget=True)
                self._kept[key] = found
            self._kept.move_to_end(key)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return found
