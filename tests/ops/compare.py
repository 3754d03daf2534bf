"""Runs one operation on a backend and compares it with its reference on equal inputs.

Tests declare operations with real tensors where they read and `empty` ones where they write; what
comes back has real tensors everywhere.
"""

import dataclasses

import pytest
import torch

from lsq.program.operation import Operation
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Coded, Dropout, RoundedGradient, Value
from lsq.quant import GRADIENT, Format, Grain, WeightFormat, pack_bits
from lsq.run.backends import backend

KEY = torch.tensor([-(2**62) + 12345], dtype=torch.int64)
"""A random key whose both halves are used."""
ROWS = (1, 7, 41, 341)
TOLERANCE = 2e-5
"""Largest difference of float outputs, relative to the largest magnitude of the reference."""
FLOOR = 2e-6
"""Added to it; torch's GELU in float32 is off by up to 1.2e-6."""


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> VirtualTensor:
    """A tensor that the operation is to write."""
    return VirtualTensor(name="output", shape=shape, dtype=dtype)


def format_of(bits: int = 8) -> Format:
    """Of an activation."""
    return Format(name="activation", bits=bits, grain=Grain.TENSOR)


def weight_format_of(bits: int = 8) -> WeightFormat:
    """Of a weight that products read as it is stored."""
    return WeightFormat(name="int8", bits=bits, grain=Grain.ROW)


def to_round(
    rows: int,
    columns: int,
    clip: float,
    *,
    bits: int = 8,
    error: bool = False,
    clipped: bool = True,
    seen: float = 0.25,
) -> Coded:
    """Codes [M, N] to write under a clip; `seen`: largest magnitude so far."""
    packed = -(-rows * columns // 8)
    return Coded(
        format=format_of(bits),
        codes=empty(rows, columns, dtype=torch.int8),
        scale=empty(1),
        clipped=empty(packed, dtype=torch.uint8) if clipped else None,
        error=empty(rows, columns) if error else None,
        clip=torch.tensor([clip]),
        seen=torch.tensor([seen]),
    )


def rounded(
    rows: int, columns: int, *, bits: int = 8, error: bool = False, share: float = 0.1
) -> Coded:
    """Codes [M, N] that the operation is to read, of which about `share` were clipped."""
    form = format_of(bits)
    codes = torch.randint(-form.largest, form.largest + 1, (rows, columns), dtype=torch.int8)
    return Coded(
        format=form,
        codes=codes,
        scale=torch.tensor([1.9 / form.largest]),
        clipped=pack_bits((torch.rand(codes.shape) < share) & (codes != 0)),
        error=torch.rand(rows, columns) - 0.5 if error else None,
        clip=torch.tensor([1.9]),
    )


def by_row(coded: Coded) -> Coded:
    """The same codes, to read or to write, with a scale for each row in place of a clip."""
    rows = coded.codes.shape[0]
    written = isinstance(coded.scale, VirtualTensor)
    scale = empty(rows) if written else coded.scale * (0.5 + torch.rand(rows))
    form = dataclasses.replace(coded.format, grain=Grain.ROW)
    return dataclasses.replace(coded, format=form, scale=scale, clipped=None, error=None)


def gradient_to_round(rows: int, columns: int) -> RoundedGradient:
    """The gradient [M, N] of a product that the operation is to write."""
    return RoundedGradient(
        format=GRADIENT,
        codes=empty(rows, columns, dtype=torch.int8),
        scale=empty(rows),
        weight_scale=0.5 + torch.rand(columns),
        key=KEY,
        subsequence=7,
    )


def dropout_of(probability: float, subsequence: int = 2) -> Dropout | None:
    """A mask; None for no dropout at all."""
    if not probability:
        return None
    return Dropout(key=KEY, subsequence=subsequence, probability=probability)


def allocated(operation: Operation, make) -> Operation:
    """`operation` with make(shape, dtype) for tensors to write, and copies of `seen`."""
    seen = {id(leaf.of(operation)) for leaf in operation.leaves() if leaf.path[-1] == "seen"}

    def placed(one):
        if isinstance(one, VirtualTensor):
            return make(one.shape, one.dtype)
        return one.clone() if id(one) in seen else one

    return operation.bind(placed)


def rubbish(shape, dtype: torch.dtype) -> torch.Tensor:
    """Memory that nobody has written: 85 in every element."""
    return torch.full(shape, 85, dtype=dtype)


def on_reference(operation: Operation) -> Operation:
    """Run the reference."""
    found = allocated(operation, rubbish)
    backend("reference").run(found)
    return found


def on_cpu(operation: Operation) -> Operation:
    """Run the CPU's implementation; scratch memory holds `scratch_rubbish`."""
    found = allocated(operation, rubbish)
    place = backend("cpu")
    scratch = [
        scratch_rubbish(torch.empty(shape, dtype=dtype)) for shape, dtype in place.scratch(found)
    ]
    place.prepare([(found, scratch)])()
    return found


def scratch_rubbish(tensor: torch.Tensor) -> torch.Tensor:
    """Fill scratch memory with NaN, or 85 in every element of integers."""
    return tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 85)


def compare(operation: Operation, exact: bool = False) -> Operation:
    """Compare CPU and reference, integers and scales bit by bit if `exact`; what the CPU made."""
    found = on_cpu(operation)
    assert_same(found, on_reference(operation), operation.name, exact)
    return found


def written(operation: Operation) -> dict[str, torch.Tensor | None]:
    """What an operation wrote, by the names of its fields."""
    return {leaf.name: leaf.of(operation) for leaf in operation.leaves() if leaf.written}


def assert_holds(value: Value, fields: dict[str, torch.Tensor | None]) -> None:
    """The tensors of a value are those of a reference, where both are there."""
    for name, wanted in fields.items():
        tensor = getattr(value, name)
        assert tensor is None or wanted is None or torch.equal(tensor, wanted), name


def assert_same(
    found: Operation,
    expected: Operation,
    where: str,
    exact: bool = False,
    slack: float = 0.0,
) -> None:
    """Floats to TOLERANCE and `slack`, NaN and infinity in the same places; sums exactly; codes and
    bits up to one in a thousand, unless `exact`.

    Codes may differ by 1 where float sums before the rounding differ in their last bits; so may the
    error of that rounding, which is an output of the same shape.
    """
    moved = torch.zeros((), dtype=torch.bool)
    wanted_of = written(expected)
    for name, output in written(found).items():
        if output is None:
            continue
        wanted, what = wanted_of[name], f"{where}: {name}"
        assert wanted is not None and output.shape == wanted.shape, what
        if exact and (name.endswith("scale") or not wanted.dtype.is_floating_point):
            assert torch.equal(output.nan_to_num(-1), wanted.nan_to_num(-1)), what
        elif wanted.dtype.is_floating_point:
            moved_here = moved if moved.shape == wanted.shape else None
            assert_close(output, wanted, moved_here, what, slack)
        elif wanted.dtype == torch.int32:
            assert torch.equal(output, wanted), f"{what}: sums differ"
        elif wanted.numel():
            differs, most = output != wanted, max(1, output.numel() // 1000)
            assert differs.sum() <= most, f"{what}: {differs.sum()} differ"
            if wanted.dtype == torch.int8:
                moved = differs
                assert (output.int() - wanted.int()).abs().max() <= 1, f"{what}: by more than 1"


def assert_close(output, wanted, moved, what: str, slack: float = 0.0) -> None:
    """Equal floats, but for elements that have `moved`."""
    assert torch.equal(output.isnan(), wanted.isnan()), f"{what}: other places are NaN"
    assert torch.equal(output[wanted.isinf()], wanted[wanted.isinf()]), f"{what}: other infinities"
    compared = wanted.isfinite() if moved is None else wanted.isfinite() & ~moved
    if compared.any():
        worst = (output - wanted)[compared].abs().max().item()
        limit = TOLERANCE * wanted[compared].abs().max().item() + FLOOR + slack
        assert worst <= limit, f"{what}: differs by {worst}, allowed {limit}"


def assert_accurate(found, exact, single, what: str = "") -> None:
    """Error at most twice that of PyTorch in float32, plus 1e-6 of the magnitude."""
    error = (found.double() - exact).abs().max().item()
    allowed = 2 * (single.double() - exact).abs().max().item() + 1e-6 * max(
        1.0, exact.abs().max().item()
    )
    assert error <= allowed, f"{what}: error {error:.2e}, allowed {allowed:.2e}"


def assert_as_accurate(found, oracle) -> None:
    """`assert_accurate` of several results; oracle(dtype) has them in float64 and float32."""
    for values in zip(found, oracle(torch.float64), oracle(torch.float32), strict=True):
        assert_accurate(*values)


def refused(message: str):
    """Expect a ValueError whose text has `message`, a regular expression."""
    return pytest.raises(ValueError, match=message)
