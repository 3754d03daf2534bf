"""Counts of kernels whose accesses and instructions are known."""

import shutil
from pathlib import Path

import pytest
import torch

from lsq.emulator import profile
from lsq.emulator.profile import Limits, fitting_blocks
from lsq.native.launch import launch

COUNTED = str(Path(__file__).parent / "kernels/counted.cu")
HOPPER = Limits(warps=64, blocks=32, shared=228 * 1024)

needs_objdump = pytest.mark.skipif(
    shutil.which("objdump") is None, reason="instructions are counted by objdump"
)
pytestmark = needs_objdump


def counted(name, *arguments, grid=1, block=32):
    (found,) = profile.profile([launch(COUNTED, name, *arguments, grid=grid, block=block)])
    return found


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (8, 32), (16, 32)])
def test_sectors_of_a_request(stride, sectors):
    x, out = torch.ones(128 * stride), torch.zeros(128 * stride)
    found = counted("strided", x, out, stride, grid=2, block=64)
    for traffic in (found.operands[0].reads, found.operands[1].writes):
        assert (traffic.requests, traffic.bytes, traffic.sectors) == (4, 512, 4 * sectors)
        assert traffic.touched == 4 * sectors
    assert found.warps == 4 and found.operands[0].bytes == 512 * stride
    assert not found.operands[0].writes.requests and not found.operands[1].reads.requests
    assert out.sum() == 2 * 128


@pytest.mark.parametrize(("stride", "passes"), [(0, 1), (1, 1), (2, 2), (32, 32)])
def test_conflicts_of_banks(stride, passes):
    found = counted("banks", torch.zeros(32), stride)
    assert (found.shared_requests, found.shared_passes, found.shared_least) == (2, passes + 1, 2)


def test_instructions():
    found = counted(
        "special", torch.ones(64), torch.zeros(64), torch.zeros(1, dtype=torch.int32), block=64
    )
    assert {kind: found.instructions[kind] for kind in ("root", "division", "logarithm")} == {
        "root": 2,
        "division": 4,
        "logarithm": 2,
    }
    assert found.operands[2].atomics.requests == 1 and found.operands[2].atomics.bytes == 4
    assert all(not traffic.requests for traffic in found.elsewhere)


def test_a_warp_pays_for_its_busiest_lane():
    found = [counted("lonely", torch.ones(1), torch.zeros(1), turns) for turns in (100, 200)]
    assert found[1].instructions["float"] - found[0].instructions["float"] == 2 * 100
    assert found[1].activity < 0.05


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks"),
    [(256, 32, 0, 8), (128, 255, 0, 2), (256, 40, 48 * 1024, 4), (32, 16, 0, 32), (1024, 65, 0, 0)],
)
def test_occupancy(threads, registers, shared, blocks):
    assert fitting_blocks(threads, registers, shared, HOPPER) == blocks


def test_no_objdump(monkeypatch):
    counted("vectors", torch.ones(256), torch.zeros(256))  # compiles the kernel
    monkeypatch.setattr(
        profile.subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(OSError("absent"))
    )
    profile._code.cache_clear()
    with pytest.raises(RuntimeError, match="install binutils"):
        counted("vectors", torch.ones(256), torch.zeros(256))
