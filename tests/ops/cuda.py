"""Runs the CUDA implementation of an operation and compares it with the reference and with the CPU
implementation.

In the emulator or on a GPU; tests/conftest.py says where. Every operation runs twice, threads in
order and then backwards, so that a missing barrier is found. With TEST_SANITIZE=1 in the
environment, the emulator runs under the sanitizers, once.
"""

import ctypes
import os

import torch

from lsq import emulator
from lsq.program.operation import Operation
from lsq.program.tensor import VirtualTensor
from lsq.run import cuda
from tests.ops.compare import (
    assert_close,
    assert_same,
    on_cpu,
    on_reference,
    scratch_rubbish,
    written,
)

place = "emulator"
SANITIZE = os.environ.get("TEST_SANITIZE") == "1"
DTYPES = (torch.float32, torch.bfloat16)
EPSILON = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}
"""Largest relative error of rounding to a dtype, with room for other roundings."""
ORDERS = (1,) if SANITIZE else (0, 1)
FENCE = 0 if SANITIZE else 2**15
"""Bytes before and after a tensor that its kernel may not write; AddressSanitizer has its own."""


def current_device():
    """Where tests of kernels run."""
    return cuda.gpu() if place == "gpu" else cuda.emulated_device(SANITIZE)


def lost_gpu() -> str | None:
    """Why a GPU takes no more work of this process (a fault of a kernel stays), or None."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def set_order(order: int) -> None:
    """The order in which the emulator runs threads: 0 forward, 1 backward, else a seed."""
    if place == "emulator":
        ctypes.CDLL(str(emulator.build_driver(SANITIZE))).lsq_emulator_order(order)


def in_dtype(operation: Operation, dtype: torch.dtype) -> Operation:
    """`operation` with its activations, read or written, in `dtype`."""
    kinds = {
        id(leaf.of(operation)): leaf.kind
        for leaf in operation.leaves()
        if leaf.of(operation) is not None
    }

    def convert(tensor):
        if kinds[id(tensor)] != "Activations":
            return tensor
        if isinstance(tensor, VirtualTensor):
            return VirtualTensor(name=tensor.name, shape=tensor.shape, dtype=dtype)
        return tensor.to(dtype)

    return operation.bind(convert)


def compare_cuda(
    operation: Operation,
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
    slack: float = 0.0,
) -> Operation:
    """Compare one operation; what the CUDA implementation made, on the CPU.

    The reference takes activations as they are after rounding to `dtype`. `exact`: integers must
    equal those of the CPU implementation bit by bit (float32 only). `slack`: allowed
    beside TOLERANCE for float32 results.
    """
    narrow = in_dtype(operation, dtype)
    results = [run(narrow, order=order) for order in ORDERS]
    check_results(results, in_dtype(narrow, torch.float32), dtype, exact, slack)
    return results[0]


def check_results(
    results: list[Operation],
    wide: Operation,
    dtype: torch.dtype,
    exact: bool,
    slack: float = 0.0,
) -> None:
    """All results are alike, and as the reference has them; see `compare_cuda`."""
    first, second = (written(results[0]), written(results[-1]))
    for name, tensor in first.items():
        same = tensor is None or same_bits(tensor, second[name])
        assert same, f"{wide.name}: the order of threads changes {name}"
    where = f"{wide.name} on CUDA, {dtype}"
    assert_same_in(dtype, results[0], on_reference(wide), where, slack)
    if exact and dtype == torch.float32:
        on_host = written(on_cpu(wide))
        for name, found in first.items():
            if found is not None and not found.dtype.is_floating_point:
                assert torch.equal(found, on_host[name]), f"{where}: {name} is not the CPU's"


def run(operation: Operation, *, order: int = 0) -> Operation:
    """Run the CUDA implementation, on rubbish; the operation with everything on the CPU."""
    target = current_device()
    set_order(order)
    fences = Fences(operation.name, target.torch_device)
    copies: dict[int, torch.Tensor] = {}

    def placed(tensor):
        if isinstance(tensor, VirtualTensor):
            return fences.around(torch.Size(tensor.shape), tensor.dtype).fill_(85)
        if id(tensor) not in copies:
            copies[id(tensor)] = fences.around(tensor.shape, tensor.dtype, Fences.READ).copy_(
                tensor
            )
        return copies[id(tensor)]

    bound = operation.bind(placed)
    scratch = [
        scratch_rubbish(fences.around(torch.Size(shape), dtype))
        for shape, dtype in bound.cuda_scratch()
    ]
    target.list(bound.cuda(*scratch), title=operation.name).run()
    fences.check()
    return bound.bind(torch.Tensor.cpu)


class Fences:
    """Memory for tensors on a device that shows when kernels write or read beyond a tensor.

    Beyond inputs lie NaN as floats and -1 as integers; beyond what kernels write other bytes.
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
            assert (fence == byte).all(), (
                f"{self._name}: writes {'after' if number % 2 else 'before'} a tensor"
            )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_same_in(
    dtype, found: Operation, expected: Operation, where: str, slack: float = 0.0
) -> None:
    """compare.assert_same, with room for one rounding to `dtype` in activations."""
    if dtype == torch.float32:
        assert_same(found, expected, where, slack=slack)
        return
    kinds = {leaf.name: leaf.kind for leaf in found.leaves()}
    others = {id(tensor) for name, tensor in written(found).items() if kinds[name] != "Activations"}
    assert_same(
        found.bind(lambda tensor: tensor if id(tensor) in others else None),
        expected,
        where,
        slack=slack,
    )
    for name, output in written(found).items():
        if output is None or kinds[name] != "Activations":
            continue
        wide, wanted = output.float(), written(expected)[name]
        # Elementwise: what the rounding alone may change is taken off before the rest is compared.
        slack = wanted.abs().nan_to_num(posinf=0.0) * EPSILON[dtype] + 2.0**-24
        near = (wide - wanted).abs() <= slack
        assert_close(torch.where(near, wanted, wide), wanted, None, f"{where}: {name}")
