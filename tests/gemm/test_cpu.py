"""Products of the CPU: exact in every layout, with the scratch memory that they ask for."""

import pytest
import torch

from lsq import gemm
from lsq.gemm import cpu
from lsq.gemm.operations import OVER_TOKENS, TILED, TILED_ALONE
from lsq.native import loader, tiles
from tests.gemm.operands import codes

built = pytest.mark.skipif(not loader.available(), reason="needs the C++ library")


OPERATIONS = (*TILED, *TILED_ALONE)


def exact(a, b):
    return (a.long() @ b.long().t()).to(torch.int32)


@pytest.mark.parametrize("rows", [1, 7, 16, 41, 341])
@pytest.mark.parametrize("inner, columns", [(16, 16), (48, 112), (512, 32), (41, 16)])
@pytest.mark.parametrize("transposed", ["neither", "first", "second", "both"])
def test_exact_in_every_layout(rows, inner, columns, transposed):
    a = codes(inner, rows).t() if transposed in ("first", "both") else codes(rows, inner)
    b = codes(inner, columns).t() if transposed in ("second", "both") else codes(columns, inner)
    wanted = exact(a, b)
    assert torch.equal(gemm.int8_product(a, b), wanted)
    assert torch.equal(gemm.reference(a, b), wanted)
    if loader.available():
        assert torch.equal(gemm.untuned_product(a, b), wanted)
    out = torch.full((rows, columns), 5, dtype=torch.int32)
    assert gemm.int8_product(a, b, out=out) is out
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("inner", [1, 3, 7, 341])
def test_the_inner_dimension_may_be_odd(inner):
    """Gradients of weights sum over rows, of which there may be any number."""
    a, b = codes(inner, 48).t(), codes(inner, 32).t()
    assert torch.equal(gemm.int8_product(a, b), exact(a, b))


@pytest.mark.parametrize("multiply", [gemm.int8_product, gemm.untuned_product, gemm.reference])
def test_the_largest_sums_fit(multiply):
    a = torch.full((1, gemm.LARGEST_INNER), 127, dtype=torch.int8)
    b = torch.full((16, gemm.LARGEST_INNER), -127, dtype=torch.int8)
    wanted = -gemm.LARGEST_INNER * 127**2
    assert wanted > -(2**31)
    assert (multiply(a, b) == wanted).all()


@pytest.mark.parametrize("multiply", [gemm.int8_product, gemm.untuned_product])
def test_what_could_overflow_is_refused(multiply):
    wide = torch.zeros(1, gemm.LARGEST_INNER + 1, dtype=torch.int8)
    with pytest.raises(ValueError, match=f"{gemm.LARGEST_INNER + 1} values.*{gemm.LARGEST_INNER}"):
        multiply(wide, wide)


def test_instructions_that_are_not_here_are_refused(monkeypatch):
    monkeypatch.setattr(tiles, "usable", lambda: ("plain",))
    monkeypatch.setattr(tiles, "fastest", lambda: "amx")
    with pytest.raises(ValueError, match="'amx' cannot run here; there are 'plain'"):
        gemm.untuned_product(codes(4, 16), codes(8, 16))


@built
@pytest.mark.parametrize("kernel", tiles.INSTRUCTIONS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_a_loop_gets_the_product(op, kernel, monkeypatch):
    if kernel not in tiles.usable():
        pytest.skip(f"this processor has no {kernel}")
    monkeypatch.setattr(tiles, "fastest", lambda: kernel)
    (length,), dtype = gemm.scratch_for(op, 40, 32, 48)
    called = []
    monkeypatch.setattr(cpu.loader, "call", lambda *arguments: called.append(arguments))
    gemm.multiply(
        op, "operation", codes(40, 48), codes(32, 48), torch.empty(length, dtype=dtype), "more"
    )
    ((name, operation, product, more),) = called
    assert (name, operation, more) == (f"lsq_multiply_{op}", "operation", "more")
    assert (product.rows, product.columns, product.inner) == (40, 32, 48)
    assert (product.instructions, product.strip) == (tiles.INSTRUCTIONS[kernel], 0)
    assert (product.memory is None) == op.startswith("vocabulary")


@pytest.mark.parametrize("op", OPERATIONS)
def test_more_tokens_never_need_less_memory(op):
    dimension = "k" if op == OVER_TOKENS else "m"
    tokens = [*range(1, 200), gemm.LARGEST_INNER, gemm.LARGEST_INNER + 1, 2 * gemm.LARGEST_INNER]
    keys = [{"m": 8, "n": 24, "k": 8} | {dimension: count} for count in tokens]
    sizes = [gemm.scratch_for(op, **numbers)[0][0] for numbers in keys]
    assert sizes == sorted(sizes)
    longest = op == OVER_TOKENS
    assert (sizes[-1] > sizes[-3]) == longest  # two blocks of sums


def test_nothing_is_asked_for_without_tokens():
    assert gemm.scratch_for("project", 0, 16, 32) == ((64,), torch.uint8)


def test_memory_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match=r"needs \d+ bytes of scratch memory, and has 64"):
        gemm.multiply(
            "project", None, codes(40, 48), codes(32, 48), torch.empty(64, dtype=torch.uint8)
        )


def test_the_rule_takes_the_fastest_instructions(monkeypatch):
    for usable, kernel in (((), "plain"), (("plain",), "plain"), (("amx", "plain"), "amx")):
        monkeypatch.setattr(tiles, "usable", lambda usable=usable: usable)
        assert tiles.fastest() == kernel
