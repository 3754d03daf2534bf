"""What operations of the CPU ask for: scratch memory that suffices, exact products, and a note of
both."""

import threading

import pytest
import torch

from lsq import gemm
from lsq.gemm import cpu, lookup
from lsq.gemm.product_key import REQUESTS
from lsq.native import tiles
from tests.gemm.operands import asked, codes


@pytest.fixture(autouse=True)
def no_files():
    gemm.set_files([])
    yield
    gemm.set_files(None)


def operands(op):
    """a [40, 48] and b [32, 48], lying as the operation has them."""
    layout = REQUESTS[op].layout
    a = codes(48, 40).t() if layout[0] == "t" else codes(40, 48)
    return a, codes(32, 48) if layout[1] == "t" else codes(48, 32).t()


def memory_for(op, *size):
    (length,), dtype = gemm.scratch_for(op, *size)
    return torch.empty(length, dtype=dtype)


@pytest.mark.parametrize("op", REQUESTS)
def test_products_are_exact_counted_and_timed(op, monkeypatch):
    """Of blocks of rows; those of tiles are tested with the operations that read them."""
    monkeypatch.setattr(tiles, "usable", lambda: ())
    a, b = operands(op)
    memory, made = memory_for(op, 40, 32, 48), torch.zeros(40, 32, dtype=torch.int32)

    def end(name, operation, sums, first, rows):
        assert name == f"lsq_end_{op}" and operation is None
        made[first : first + rows] = sums

    monkeypatch.setattr(cpu.loader, "call", end)
    gemm.multiply(op, None, a, b, memory)
    assert torch.equal(made, gemm.reference(a, b))
    (use,) = lookup.table().uses()
    assert use.key == asked(op, 40, 32, 48) and use.calls == 1 and use.seconds > 0


def test_requests_are_noted_where_somebody_listens():
    gemm.scratch_for("project", 8, 16, 32)
    with gemm.requested() as found:
        gemm.scratch_for("project", 8, 16, 32)
        with gemm.requested() as inner:
            gemm.scratch_for("vocabulary_loss", 8, 16, 32)
        other = threading.Thread(target=gemm.scratch_for, args=("project", 9, 16, 32))
        other.start()
        other.join()
        gemm.scratch_for("project_weight_gradient", 16, 32, 8)
    gemm.scratch_for("project", 8, 16, 32)
    assert found == [asked("project", 8, 16, 32), asked("project_weight_gradient", 16, 32, 8)]
    assert inner == [asked("vocabulary_loss", 8, 16, 32)]


def test_nothing_is_asked_for_without_tokens():
    with gemm.requested() as found:
        assert gemm.scratch_for("project", 0, 16, 32) == ((64,), torch.uint8)
    assert not found


def test_mistakes(monkeypatch):
    monkeypatch.setattr(tiles, "usable", lambda: ())
    with pytest.raises(ValueError, match="op is 'conv'; allowed"):
        gemm.scratch_for("conv", 8, 16, 32)
    a, b = operands("project")
    with pytest.raises(
        ValueError, match=r"needs 5120 bytes of scratch memory .*, and has 64; choose"
    ):
        gemm.multiply("project", None, a, b, torch.empty(64, dtype=torch.uint8))
