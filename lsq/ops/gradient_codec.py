"""The operations on gradient messages as plain functions, for callers outside programs: they write into given memory.

On the CPU the fused loops run, or the references where the library is not built; on a GPU the kernels, on PyTorch's
current stream, and the caller keeps the tensors until they are done, as with any kernel of its own. v values, S shards,
M bytes of a message, N messages, R copies; see gradient_layout.py.
"""

import dataclasses
import threading
from collections import OrderedDict

import torch

from lsq.csrc.device import Device
from lsq.csrc.launch import FLOATS, check
from lsq.csrc.launch_list import LaunchList, contiguous_address
from lsq.ops import device, gradient_messages, registry
from lsq.ops.gradient_layout import MessageLayout


def pack(
    x: torch.Tensor, layout: MessageLayout, *, out: torch.Tensor, error: torch.Tensor | None = None,
    key: torch.Tensor | None = None, stochastic: bool = False, stream: int = 0,
) -> None:
    """Write the messages of x, see gradient_messages.pack_reference.

    Args:
        x: float32, bfloat16 or float16 [v], or [R, v], whose rows are added up in order.
        layout: of the messages.
        out: uint8 [S, M].
        error: float32 [v] for value - code * scale, which may be the memory of x [v]; or None.
        key: int64 [1] on the device of x; needed to round at random.
        stochastic: round at random instead of to the nearest code.
        stream: of the random numbers, which differ between ranks and buckets.

    Raises:
        ValueError: a tensor has another shape, dtype or place than it should; on a GPU also where memory does not begin
            at a multiple of 16 bytes.
    """
    rows = x[None] if x.dim() == 1 else x
    check(
        rows.dim() == 2 and rows.shape[1] == layout.values,
        f"values to pack have the shape {list(x.shape)}; the layout wants [{layout.values}], or several rows of that",
    )
    _check_float("values to pack are", x)
    wanted = {"out": (out, torch.uint8, (layout.shards, layout.message_bytes))}
    if error is not None:
        wanted["error"] = error, torch.float32, (layout.values,)
    _check(x, wanted)
    _run(
        gradient_messages.PACK, (rows, key), (out, error), shards=layout.shards, length=layout.length,
        bits=layout.bits, block=layout.block, stochastic=stochastic, stream=stream, error=error is not None,
    )


def sum_messages(
    messages: torch.Tensor, layout: MessageLayout, *, out: torch.Tensor, out_layout: MessageLayout | None = None,
    factor: float = 1.0, key: torch.Tensor | None = None, stochastic: bool = False, stream: int = 0,
) -> None:
    """Write the sum of messages times `factor` as one message, see gradient_messages.sum_reference.

    Args:
        messages: uint8 [N, M], all of one shard.
        layout: of the messages; its length, block and bits count.
        out: uint8 [M'], the message of the sum.
        out_layout: of that, with the same length and block; None: `layout`.
        factor: e.g. 1 / world size.
        key: see `pack`.
        stochastic: see `pack`.
        stream: see `pack`.

    Raises:
        ValueError: see `pack`; or the two layouts differ in more than bits.
    """
    out_layout = out_layout or layout
    check(
        (layout.length, layout.block) == (out_layout.length, out_layout.block),
        f"messages have shards of {layout.length} values in blocks of {layout.block}, their sum {out_layout.length} in "
        f"blocks of {out_layout.block}; only the bits may differ",
    )
    _check(messages, {"out": (out, torch.uint8, (out_layout.message_bytes,))})
    _run(
        gradient_messages.SUM, (messages, key), (out,), length=layout.length, bits=layout.bits,
        out_bits=out_layout.bits, block=layout.block, stochastic=stochastic, stream=stream, factor=float(factor),
    )


def unpack(messages: torch.Tensor, layout: MessageLayout, *, out: torch.Tensor, factor: float = 1.0) -> None:
    """Write the values of messages times `factor`, see gradient_messages.unpack_reference.

    Args:
        messages: uint8 [S, M], or [R, S, M], whose copies are added up in order.
        layout: of the messages.
        out: float32, bfloat16 or float16 [v].
        factor: multiplies the sum before it is rounded to the dtype of `out`.

    Raises:
        ValueError: see `pack`.
    """
    copies = messages[None] if messages.dim() == 2 else messages
    check(
        copies.dim() == 3 and copies.shape[1] == layout.shards,
        f"messages to unpack have the shape {list(messages.shape)}; the layout wants [{layout.shards}, "
        f"{layout.message_bytes}], or several copies of that",
    )
    _check_float("values are to be unpacked to", out)
    _check(messages, {"out": (out, out.dtype, (layout.values,))})
    _run(
        gradient_messages.UNPACK, (copies,), (out,), values=layout.values, length=layout.length, bits=layout.bits,
        block=layout.block, factor=float(factor), dtype=out.dtype,
    )


def _check_float(what: str, tensor: torch.Tensor) -> None:
    check(tensor.dtype in FLOATS, f"{what} {tensor.dtype}; it must be one of {', '.join(map(str, FLOATS))}")


def _check(given: torch.Tensor, wanted: dict[str, tuple[torch.Tensor, torch.dtype, tuple[int, ...]]]) -> None:
    """Refuse results that do not fit what was given."""
    check(
        given.is_contiguous(),
        f"a tensor of shape {list(given.shape)} with strides {given.stride()} is not contiguous; call .contiguous()",
    )
    for name, (tensor, dtype, shape) in wanted.items():
        check(
            tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous(),
            f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}; it must be a contiguous "
            f"{dtype} {list(shape)}",
        )
        check(
            tensor.device == given.device,
            f"{name} lies on {tensor.device}, but what was given on {given.device}; move it with .to()",
        )


def _run(definition: registry.OpDefinition, inputs: tuple, outputs: tuple, **attributes) -> None:
    place = inputs[0].device
    if place.type == "cuda":
        with torch.cuda.device(place):
            _KERNELS.run(device.gpu(place.index), definition, inputs, outputs, attributes)
        return
    if registry.fused_available():
        definition.cpu(*inputs, *outputs, **attributes)
        return
    for output, found in zip(outputs, definition.reference(*inputs, **attributes), strict=True):
        if output is not None:
            output.copy_(found)


class KernelCache:
    """The launches of operations whose kernels need nothing but their tensors, kept for calls on the same memory.

    Buckets and messages lie at the same addresses in every step. A kept list knows addresses, shapes and dtypes alone
    and keeps no tensor alive; it runs for whatever tensors lie there. Threads may share a cache.

    Args:
        size: lists that are kept; those used longest ago are dropped.
    """

    def __init__(self, size: int):
        self._size = size
        self._lists: OrderedDict[tuple, LaunchList] = OrderedDict()
        self._lock = threading.Lock()

    def run(self, target: Device, definition: registry.OpDefinition, inputs, outputs, attributes: dict) -> None:
        """Launch an operation on the current stream of `target`.

        Raises:
            ValueError: a tensor lies elsewhere, is not contiguous or does not begin at a multiple of 16 bytes.
            RuntimeError: a kernel does not compile, or a launch fails.
        """
        described = (None if t is None else (t.data_ptr(), tuple(t.shape), t.dtype) for t in (*inputs, *outputs))
        key = target, definition.name, tuple(described), tuple(attributes.items())
        with self._lock:
            found = self._lists.get(key)
            if found is None:
                found = self._lists[key] = self._prepared(target, definition, inputs, outputs, attributes)
            self._lists.move_to_end(key)
            if len(self._lists) > self._size:
                self._lists.popitem(last=False)
        found.run()

    def _prepared(self, target: Device, definition, inputs, outputs, attributes: dict) -> LaunchList:
        def pinned(argument):
            if not isinstance(argument, torch.Tensor):
                return argument
            return contiguous_address(argument, target.place, definition.name)

        entries = [
            dataclasses.replace(entry, arguments=tuple(map(pinned, entry.arguments)))
            for entry in definition.cuda(*inputs, *outputs, **attributes)
        ]
        return target.list(entries, title=definition.name)


_KERNELS = KernelCache(1024)
