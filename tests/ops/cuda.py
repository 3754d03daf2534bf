"""Runs the CUDA implementation of an operation and compares it with the reference and with the CPU implementation.

In the emulator or on a GPU; tests/conftest.py says where. Every operation runs twice: threads in order with direct
pointers, then threads backwards with slots in place of all pointers, so that a missing barrier and a pointer that is
not resolved are found. With TEST_SANITIZE=1 in the environment, the emulator runs under the sanitizers, once.
"""

import ctypes
import os

import torch

from lsq.csrc import emulator
from lsq.csrc.launch import Launch, Product
from lsq.ops import device, registry
from tests.ops.compare import assert_close, assert_equal, fused

place = "emulator"
SANITIZE = os.environ.get("TEST_SANITIZE") == "1"
EPSILON = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
"""Largest relative error of rounding to a dtype, with room for a value that rounds the other way."""
ORDERS = (1,) if SANITIZE else (0, 1)
FENCE = 0 if SANITIZE else 2**15
"""Bytes before and after a tensor that its kernel may not write; AddressSanitizer has its own."""


def current_device():
    """Where tests of kernels run."""
    return device.gpu() if place == "gpu" else device.emulated(SANITIZE)


def set_order(order: int) -> None:
    """The order in which the emulator runs threads: 0 forward, 1 backward, else a seed."""
    if place == "emulator":
        ctypes.CDLL(str(emulator.build_driver(SANITIZE))).lsq_emulator_order(order)


def compare_cuda(
    name: str, *inputs, dtype: torch.dtype = torch.float32, floats=(), unwanted=(), exact: bool = False, **attributes
) -> tuple:
    """Compare one operation; returns the outputs of the CUDA implementation, on the CPU.

    Args:
        inputs: as the reference takes them; activations in `dtype`.
        dtype: of the activations.
        floats: numbers of the outputs that have `dtype`; other float outputs are float32.
        unwanted: numbers of the outputs that the caller does without.
        exact: integers must equal those of the CPU implementation bit by bit (float32 only).
    """
    definition = registry.definition(name)
    wide = [widened(tensor) for tensor in inputs]
    expected = definition.reference(*wide, **attributes)
    results = [
        run(definition, inputs, expected, dtype, floats, unwanted, attributes, order=order, slots=order > 0)
        for order in ORDERS
    ]
    for first, second in zip(results[0], results[-1], strict=True):
        assert first is None or same_bits(first, second), f"{name}: the order of threads changes a result"
    outputs = results[0]
    where = f"{name} on CUDA, {dtype}"
    assert_equal_in(dtype, outputs, expected, floats, where)
    if exact and dtype == torch.float32:
        on_cpu = fused(name, *wide, unwanted=unwanted, **attributes)
        for number, (found, wanted) in enumerate(zip(outputs, on_cpu, strict=True)):
            if found is not None and not found.dtype.is_floating_point:
                assert torch.equal(found, wanted), f"{where}: output {number} is not the CPU's"
    return outputs


def run(
    definition, inputs, expected, dtype, floats, unwanted, attributes, *, order: int = 0, slots: bool = False
) -> tuple:
    """Outputs of the CUDA implementation, on the CPU; memory that it does not write holds rubbish."""
    target = current_device()
    set_order(order)
    fences = Fences(definition.name, target.place)
    outputs = [
        None if wanted is None or number in unwanted
        else fences.around(wanted.shape, dtype if number in floats else wanted.dtype).fill_(85)
        for number, wanted in enumerate(expected)
    ]
    given = [
        None if tensor is None else fences.around(tensor.shape, tensor.dtype, Fences.READ).copy_(tensor)
        for tensor in inputs
    ]
    scratch = [
        rubbish(fences.around(tensor.shape, tensor.dtype))
        for tensor in device.scratch_for(definition, given, attributes, target.place)
    ]
    entries = definition.cuda(*given, *outputs, *scratch, **attributes)
    if slots:
        named = slot_tensors(entries)
        target.list(entries, slots=named, title=definition.name).run(**named)
    else:
        target.list(entries, title=definition.name).run()
    fences.check()
    return tuple(None if output is None else output.cpu() for output in outputs)


class Fences:
    """Memory for tensors of an operation on a device, where kernels that write beyond a tensor are found out.

    What lies beyond inputs is NaN as floats and -1 as integers, so that reading it shows as well, and beyond what
    kernels write it is something else, so that copying it shows, too.
    """

    READ, WRITTEN = 255, 85

    def __init__(self, name: str, place: torch.device):
        self._name, self._place = name, place
        self._fences: list[tuple[int, torch.Tensor]] = []

    def around(self, shape: torch.Size, dtype: torch.dtype, byte: int = WRITTEN) -> torch.Tensor:
        """A tensor that is not filled yet, between fences of one byte again and again."""
        size = shape.numel() * dtype.itemsize
        whole = torch.full((2 * FENCE + size,), byte, dtype=torch.uint8, device=self._place)
        self._fences += [(byte, whole[:FENCE]), (byte, whole[FENCE + size :])]
        return whole[FENCE : FENCE + size].view(dtype).view(shape)

    def check(self) -> None:
        """Raise AssertionError where something was written since."""
        for number, (byte, fence) in enumerate(self._fences):
            assert (fence == byte).all(), f"{self._name}: writes {'after' if number % 2 else 'before'} a tensor"


def slot_tensors(entries) -> dict[str, torch.Tensor]:
    """Every tensor that launches take and products do not, under names."""
    fixed = {
        tensor.data_ptr()
        for entry in entries if isinstance(entry, Product)
        for tensor in (entry.a, entry.b, entry.out, entry.alpha) if isinstance(tensor, torch.Tensor)
    }  # fmt: skip
    found = {
        tensor.data_ptr(): tensor
        for entry in entries if isinstance(entry, Launch)
        for tensor in entry.arguments if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in {0, *fixed}
    }  # fmt: skip
    return {f"tensor_{number}": tensor for number, tensor in enumerate(found.values())}


def rubbish(tensor: torch.Tensor) -> torch.Tensor:
    """Fill scratch memory with NaN, or 85 in every byte of an integer tensor."""
    return tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 85)


def widened(tensor):
    """Half-precision floats as float32; anything else as it is."""
    return tensor.float() if tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_equal_in(dtype, outputs, expected, floats, where: str) -> None:
    """compare.assert_equal, with room for one rounding to `dtype` in the outputs `floats`."""
    if dtype == torch.float32:
        assert_equal(outputs, expected, where)
        return
    others = [None if number in floats else output for number, output in enumerate(outputs)]
    assert_equal(others, expected, where)
    for number in floats:
        if outputs[number] is None:
            continue
        found, wanted = outputs[number].float(), expected[number]
        # Elementwise: what the rounding alone may change is taken off before the rest is compared.
        slack = wanted.abs().nan_to_num(posinf=0.0) * EPSILON[dtype] + 2.0**-24
        near = (found - wanted).abs() <= slack
        assert_close(torch.where(near, wanted, found), wanted, None, f"{where}: output {number}")
