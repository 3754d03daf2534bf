"""PyTorch on the CPU as if it were on the emulated device: tensors begin and end, and operations
run, on streams.

Kernels of lsq's emulated backend report what they touch by themselves; here PyTorch's own
operations do. Tensors that are made under `OnStreams` end as those of PyTorch's caching allocator:
on the stream that they were made on.
"""

import contextlib
import ctypes
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lsq.run import backends, cuda
from lsq.run.cuda import CUDA
from tests.emulator.emulated import CudaError, Driver
from tests.emulator.emulated_streams import HOST, Stream, device, handle_of, watched

WAITS = {"aten._local_scalar_dense.default"}
"""Operations that wait for the device."""
UNTOUCHED = ("aten.empty", "aten.set_")
"""Beginnings of operations that touch no memory, beside views."""


class OnStreams(TorchDispatchMode):
    """Within it the driver watches, and all runs on the `current` stream; `faults` are those of
    memory's ends."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.driver, self.current, self.faults = Driver(), None, []
        self.arenas = []  # tensors whose memory others cut up: its pieces neither begin nor end
        self._stack = contextlib.ExitStack()
        self._known = weakref.WeakValueDictionary()  # storages by their address in C++
        self._recorded = weakref.WeakKeyDictionary()  # storage -> streams that it was recorded for
        # storage -> what ends its memory, when it does or is resized
        self._ends = weakref.WeakKeyDictionary()
        self.backend = CUDA(cuda.emulated_device())
        monkeypatch.setattr(self.backend.target, "stream", self._handle)
        monkeypatch.setattr(
            self.backend.target, "record", lambda tensor: tensor.record_stream(self.current)
        )
        monkeypatch.setattr(backends, "for_device", lambda device, activations=None: self.backend)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(torch.Tensor, "record_stream", self._recorder())
        monkeypatch.setattr(torch.UntypedStorage, "resize_", self._resizer())

    def __enter__(self):
        self._stack.enter_context(watched(self.driver))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._stack.close()

    def stream(self, device=None):
        """A new one, on which everything runs `with` it, as with torch.Stream."""
        return CurrentStream(self)

    @contextlib.contextmanager
    def on(self, stream):
        """Everything runs on `stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        aliases = (argument.alias_info for argument in function._schema.arguments)
        written = [alias is not None and alias.is_write for alias in aliases]
        read = [tensor for tensor, writes in self._tensors(arguments, written) if not writes]
        changed = [tensor for tensor, writes in self._tensors(arguments, written) if writes]
        changed += tree_flatten(options.get("out"))[0] if "out" in options else []
        result = function(*arguments, **options)
        if function.is_view:
            return result
        made = [tensor for tensor in tree_flatten(result)[0] if isinstance(tensor, torch.Tensor)]
        given = {tensor.untyped_storage()._cdata for tensor in [*read, *changed]}
        made = [tensor for tensor in made if tensor.untyped_storage()._cdata not in given]
        for tensor in made:
            self._begin(tensor, str(function), handle_of(self.current))
        if str(function).startswith(UNTOUCHED):
            return result
        for tensors, writes in ((read, 0), ([*changed, *made], 1)):
            for tensor in tensors:
                self._use(tensor, str(function), writes)
        if str(function) in WAITS:
            self.driver("cuStreamSynchronize", handle_of(self.current))
        return result

    def _handle(self):
        return self.current.handle.value if self.current is not None else 0

    @staticmethod
    def _tensors(arguments, written):
        for argument, writes in zip(arguments, written, strict=False):
            for tensor in tree_flatten(argument)[0]:
                if isinstance(tensor, torch.Tensor):
                    yield tensor, writes

    def _use(self, tensor, name, writes):
        if tensor.numel() and tensor.device.type == "cpu":
            self._begin(tensor, "of the host", HOST)
            count = 1 + sum(
                (size - 1) * stride
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            place = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(count * tensor.itemsize)
            self.driver("lsq_emulator_use", handle_of(self.current), name.encode(), *place, writes)

    def _begin(self, tensor, name, owner):
        """Its memory begins where it is not known; what others than PyTorch's operations made is of
        the host."""
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu" and self._known.get(storage._cdata) is not storage:
            self._begin_storage(storage, name, owner)

    def _begin_storage(self, storage, name, owner):
        first = storage.data_ptr()
        if any(
            arena.data_ptr() <= first < arena.data_ptr() + arena.nbytes for arena in self.arenas
        ):
            return
        if storage.nbytes():
            self._known[storage._cdata] = storage
            place = ctypes.c_void_p(first)
            size = ctypes.c_size_t(storage.nbytes())
            self.driver("lsq_emulator_memory_begin", owner, name.encode(), place, size)
            recorded = self._recorded[storage] = []
            self._ends[storage] = weakref.finalize(storage, self._end, owner, place, recorded)

    def _resizer(self):
        resize = torch.UntypedStorage.resize_

        def ends_and_begins(storage, size):
            if storage in self._ends:
                self._ends.pop(storage)()
                self._known.pop(storage._cdata, None)
            resize(storage, size)
            if self.current is not None:
                self._begin_storage(storage, "of a storage", handle_of(self.current))
            return storage

        return ends_and_begins

    def _recorder(self):
        return lambda tensor, stream: self._recorded.get(tensor.untyped_storage(), []).append(
            stream
        )

    def _end(self, owner, place, recorded):
        others = (ctypes.c_void_p * len(recorded))(*(handle_of(other) for other in recorded))
        try:
            with device(self.driver, 0):
                count = ctypes.c_size_t(len(recorded))
                self.driver("lsq_emulator_memory_end", owner, place, others, count)
        except CudaError as error:
            self.faults.append(str(error))


class CurrentStream(Stream):
    """What OnStreams.stream returns."""

    def __init__(self, streams):
        super().__init__(streams.driver)
        self._streams, self._entered = streams, []

    def __enter__(self):
        self._entered.append(self._streams.on(self))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *error):
        self._entered.pop().__exit__(*error)
