"""Compares each operation's CPU implementation with its reference on equal inputs, alone or along a whole program."""

import torch

from lsq.ops import registry
from lsq.program.frames import FreshFrame
from lsq.program.program import Program
from lsq.program.samples import KEY, border_tensors

__all__ = ["KEY", "assert_accurate", "assert_close", "assert_equal", "compare", "compare_program", "fused"]

TOLERANCE = 2e-5
"""Largest difference of float outputs, relative to the largest magnitude of the reference."""
FLOOR = 2e-6
"""Added to it; torch's GELU in float32 is off by up to 1.2e-6."""


def compare_program(program: Program, seed: int = 0) -> set[str]:
    """Compare every operation of `program`; returns the names of those that ran."""
    values = border_tensors(program, seed)
    for index, operation in enumerate(program.operations):
        inputs = [None if tensor is None else values[tensor] for tensor in operation.inputs]
        written = FreshFrame().tensors_for(index, operation)
        outputs = written[: len(operation.outputs)]
        expected = operation.definition.reference(*inputs, **operation.attributes)
        operation.definition.cpu(*inputs, *written, **operation.attributes)
        assert_equal(outputs, expected, f"{program.name}: {operation.name} -> {operation.outputs}")
        values.update((t, wanted) for t, wanted in zip(operation.outputs, expected, strict=True) if t is not None)
    return {operation.name for operation in program.operations}


def compare(name: str, *inputs, unwanted=(), **attributes) -> tuple:
    """Compare one operation on `inputs`; returns the outputs of the CPU implementation.

    The numbers in `unwanted` are outputs that the caller does without, as some programs do.
    """
    outputs = fused(name, *inputs, unwanted=unwanted, **attributes)
    expected = registry.definition(name).reference(*inputs, **attributes)
    assert_equal(outputs, expected, name)
    return outputs


def fused(name: str, *inputs, unwanted=(), **attributes) -> tuple:
    """Outputs of the CPU implementation alone; memory that it does not write holds rubbish."""
    definition = registry.definition(name)
    expected = definition.reference(*inputs, **attributes)
    outputs = tuple(
        None if wanted is None or number in unwanted else torch.full_like(wanted, 85)
        for number, wanted in enumerate(expected)
    )
    wanted = definition.scratch(*inputs, **attributes) if definition.scratch else ()
    scratch = [torch.empty(shape, dtype=dtype) for shape, dtype in wanted]
    definition.cpu(*inputs, *outputs, *scratch, **attributes)
    return outputs


def assert_equal(outputs, expected, where: str) -> None:
    """Floats to TOLERANCE, NaN and infinity in the same places; sums exactly; codes and bits up to one in a thousand.

    Codes may differ by 1 where float sums before the rounding differ in their last bits; so may the error of
    that rounding, which is an output of the same shape.
    """
    moved = torch.zeros((), dtype=torch.bool)
    for number, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if output is None:
            continue
        what = f"{where}: output {number}"
        assert wanted is not None and output.shape == wanted.shape and output.dtype == wanted.dtype, what
        if wanted.dtype.is_floating_point:
            assert_close(output, wanted, moved if moved.shape == wanted.shape else None, what)
        elif wanted.dtype == torch.int32:
            assert torch.equal(output, wanted), f"{what}: sums differ"
        elif wanted.numel():
            differs = output != wanted
            assert differs.sum() <= max(1, output.numel() // 1000), f"{what}: {differs.sum()} differ"
            if wanted.dtype == torch.int8:
                moved = differs
                assert (output.int() - wanted.int()).abs().max() <= 1, f"{what}: codes differ by more than 1"


def assert_close(output, wanted, moved, what: str) -> None:
    """Equal floats, but for elements that have `moved`."""
    assert torch.equal(output.isnan(), wanted.isnan()), f"{what}: other places are NaN"
    assert torch.equal(output[wanted.isinf()], wanted[wanted.isinf()]), f"{what}: other infinities"
    compared = wanted.isfinite() if moved is None else wanted.isfinite() & ~moved
    if compared.any():
        worst = (output - wanted)[compared].abs().max().item()
        limit = TOLERANCE * wanted[compared].abs().max().item() + FLOOR
        assert worst <= limit, f"{what}: differs by {worst}, allowed {limit}"


def assert_accurate(found, exact, single, what: str = "") -> None:
    """Error against float64 at most twice that of the float32 PyTorch operation, plus 1e-6 of the magnitude."""
    error = (found.double() - exact).abs().max().item()
    allowed = 2 * (single.double() - exact).abs().max().item() + 1e-6 * max(1.0, exact.abs().max().item())
    assert error <= allowed, f"{what}: error {error:.2e}, allowed {allowed:.2e}"
