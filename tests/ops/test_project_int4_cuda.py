"""The kernel that multiplies weights as int4 stores them: the codes of Project with the unpacked
weight on the CPU."""

import pytest
import torch

from lsq.emulator import profile
from lsq.ops.nonlinearity import Activation
from lsq.ops.project import Project
from lsq.ops.project_cuda import packed_tile, project_product
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Weight
from lsq.quant import WEIGHT_FORMATS, Grain
from tests.ops.compare import empty, on_cpu
from tests.ops.cuda import ORDERS, run
from tests.ops.test_project import operands, rounded_project
from tests.ops.tiles import TARGETS, assert_two_blocks_fit

INT4 = WEIGHT_FORMATS["int4"](8, Grain.ROW)


def weights(inner, outputs):
    """The same one as it is stored, and as codes."""
    stored, scale = INT4.encode(torch.randn(outputs, inner), 1.0 + torch.rand(outputs))
    plain = WEIGHT_FORMATS["int8"](8, Grain.ROW)
    return (
        Weight(format=INT4, codes=stored, scale=0.05 * scale),
        Weight(format=plain, codes=INT4.unpack(stored, inner).contiguous(), scale=0.05 * scale),
    )


@pytest.mark.parametrize(
    "rows, inner, outputs",
    [(1, 16, 16), (3, 32, 80), (41, 48, 32), (64, 272, 144), (5, 208, 64), (130, 528, 48)],
)
@pytest.mark.parametrize("activation", [Activation.none, Activation.gelu])
def test_codes_are_exact(rows, inner, outputs, activation):
    given, (stored, plain) = operands(rows, inner, outputs), weights(inner, outputs)
    wanted = on_cpu(rounded_project(rows, outputs, activation, **given | {"weight": plain})).rounded
    for order in ORDERS:
        found = run(
            rounded_project(rows, outputs, activation, **given | {"weight": stored}), order=order
        ).rounded
        for name in ("codes", "scale", "clipped"):
            assert torch.equal(getattr(found, name), getattr(wanted, name))


def test_every_code_under_every_multiplier():
    q, x = torch.arange(-8, 8.0).repeat(2), torch.eye(32, dtype=torch.int8)
    values = torch.stack([m * q / 2 for m in (*range(-15, 0), *range(1, 16))] + [0 * q, q])
    codes, scale = INT4.encode(values, torch.tensor([60.0]).expand(32))
    given = operands(32, 32, 32) | {
        "weight": Weight(format=INT4, codes=codes, scale=torch.ones(32)),
        "bias": None,
    }
    given["x"].coded.codes, given["x"].coded.scale = x, scale[:1]
    found = run(Project(**given, out=empty(32, 32)))
    assert torch.equal(found.out.t()[:30], values[:30])


def test_weights_are_read_as_they_are_stored():
    """16 bytes and a multiplier for 32 values, and what of a row's last word belongs to the next
    step."""
    rows, inner, outputs = 16, 512, 128
    stored, _ = weights(inner, outputs)
    operation = rounded_project(
        rows, outputs, **operands(rows, inner, outputs) | {"weight": stored}
    ).bind(
        lambda one: (
            torch.zeros(one.shape, dtype=one.dtype) if isinstance(one, VirtualTensor) else one
        )
    )
    entry = project_product(operation, packed_tile(rows, operation.x.tensor.shape[1]))
    (found,) = profile.profile([entry])
    traffic = dict(zip(map(id, profile.operands_of(entry)), found.operands, strict=True))
    assert (
        traffic[id(stored.codes)].reads.bytes <= 1.2 * stored.codes.numel() < 0.64 * inner * outputs
    )


def turns():
    """Three steps along K and more, by both tiles."""
    for rows in (41, 150):
        test_codes_are_exact(rows, 272, 144, Activation.gelu)


@pytest.mark.parametrize("target", TARGETS)
def test_two_blocks_fit_and_nothing_spills(target):
    stored, _ = weights(48, 32)
    for rows in (64, 65):
        operation = rounded_project(
            7, 32, Activation.gelu, 0.1, **operands(7, 48, 32) | {"weight": stored}
        )
        operation.rounded.started = True
        assert_two_blocks_fit(
            project_product(operation, packed_tile(rows, operation.x.tensor.shape[1])), target
        )
