"""Rotary embeddings and norms of heads against plain PyTorch in float64, on the CPU and on CUDA."""

import math

import pytest
import torch

from lsq.ops.rotation import HeadNorms, Rotate, RotateGradient, Rotation, rotation_table
from lsq.ops.sums import SummedGradient
from lsq.run.backends import run
from tests.ops.compare import (
    ROWS,
    assert_as_accurate,
    assert_holds,
    compare,
    empty,
    on_cpu,
    on_reference,
    refused,
    to_round,
)
from tests.ops.compare import gradient_to_round as to_round_by_row
from tests.ops.cuda import DTYPES, compare_cuda

PLACES = 50
EPSILON = 1e-6


def table(rotated: int) -> torch.Tensor:
    """Of PLACES, with the frequencies of Llama."""
    return rotation_table(1e4 ** (-torch.arange(0, rotated, 2) / rotated), PLACES)


def rotate(rows=41, *, width=16, rotated=None, queries=4, keys=2, normed=False, to=None) -> Rotate:
    """Of random projections and positions; `to`: the clip of codes, else floats."""
    columns, norms = (queries + 2 * keys) * width, None
    if normed:
        weights = {name: 1 + 0.2 * torch.randn(width) for name in ("query", "key")}
        norms = HeadNorms(**weights, rstd=empty(rows, queries + keys), epsilon=EPSILON)
    return Rotate(
        x=torch.randn(rows, columns).bfloat16().float(),
        norms=norms,
        out=empty(rows, columns) if to is None else None,
        rotation=Rotation(
            table=table(width if rotated is None else rotated),
            positions=torch.randint(PLACES, (rows,)),
            width=width,
            queries=queries,
            keys=keys,
        ),
        rounded=None if to is None else to_round(rows, columns, to),
    )


def gradient_of(forward: Rotate, *, to_rounded=False) -> RotateGradient:
    """For a random gradient, as floats or rounded; the reference runs `forward`."""
    shape, width = forward.x.shape, forward.rotation.width
    found = {"rounded": to_round_by_row(*shape)} if to_rounded else {"floats": empty(*shape)}
    more = {}
    if forward.norms is not None:
        norms = on_reference(forward).norms
        more = {"x": forward.x, "norms": norms, "dquery": empty(width), "dkey": empty(width)}
    return RotateGradient(
        gradient=torch.randn(shape).bfloat16().float(),
        rotation=forward.rotation,
        dx=SummedGradient(**found, sum=empty(shape[1])),
        **more,
    )


def by_torch(forward: Rotate, dtype):
    """Complex numbers turn: (leaves, result)."""
    rotation, norms, x = forward.rotation, forward.norms, forward.x.to(dtype).requires_grad_()
    leaves, half = [x], rotation.rotated // 2
    q, k, v = x.unflatten(1, (-1, rotation.width)).split(
        [rotation.queries, rotation.keys, rotation.keys], dim=1
    )
    if norms is not None:
        weights = [one.to(dtype).requires_grad_() for one in (norms.query, norms.key)]
        leaves += weights
        q, k = (
            torch.nn.functional.rms_norm(one, (rotation.width,), weight, EPSILON)
            for one, weight in zip((q, k), weights, strict=True)
        )
    angle = torch.complex(*rotation.table.to(dtype)[rotation.positions].split(half, dim=1))[:, None]

    def rotated(one):
        low, high, _ = (part.contiguous() for part in one.tensor_split([half, 2 * half], dim=2))
        number = torch.complex(low, high) * angle
        return torch.cat([number.real, number.imag, one[..., 2 * half :]], dim=2)

    return leaves, torch.cat([rotated(q), rotated(k), v], dim=1).flatten(1)


CASES = [
    {},
    {"width": 64},
    {"width": 24, "rotated": 16},
    {"width": 6, "rotated": 2, "keys": 4},
    {"queries": 0, "keys": 3},
]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("options", CASES)
def test_as_accurate_as_torch(options, normed):
    forward = rotate(**options, normed=normed)
    found, backward = compare(forward), compare(gradient_of(forward))
    gradients = backward.dx.floats, backward.dquery, backward.dkey

    def oracle(dtype):
        leaves, result = by_torch(forward, dtype)
        total = (result * backward.gradient).sum()
        return [result.detach(), *torch.autograd.grad(total, leaves)]

    assert_as_accurate([found.out, *gradients[: 1 + 2 * normed]], oracle)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"rows": 7, "width": 64},
        {"width": 24, "rotated": 16},
        {"rows": 3, "width": 128, "queries": 3, "keys": 1},
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_passes_on_cuda(options, normed, dtype):
    """One vector of a thread, with columns that stay; two."""
    forward = rotate(**options, normed=normed)
    compare_cuda(forward, dtype)
    compare_cuda(gradient_of(forward), dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows", [0, *ROWS])
def test_ends(rows, normed, compared):
    """Rounding to codes; rounding of the gradient by rows."""
    forward = rotate(rows, width=32, normed=normed, to=0.9)
    found = compared(forward, exact=not normed)
    assert_holds(found.rounded, found.rounded.encode(found.unrounded(run)))
    compared(gradient_of(forward, to_rounded=True))


def test_codes_are_the_references():
    """No sum comes before the rounding: every device has the same numbers."""
    forward = rotate(341, to=0.9)
    assert torch.equal(on_cpu(forward).rounded.codes, on_reference(forward).rounded.codes)


def test_scores_depend_on_distances_alone():
    """q k^T of equal rows is constant along diagonals (Su et al. 2021, equation 16)."""
    forward = rotate(PLACES, width=32, queries=1, keys=1)
    forward.x[:] = forward.x[0]
    forward.rotation.positions = torch.arange(PLACES)
    q, k, _ = on_cpu(forward).out.split(32, dim=1)
    scores = q @ k.t()
    for distance in range(-PLACES + 1, PLACES):
        one = scores.diagonal(distance)
        torch.testing.assert_close(one, one[:1].expand(len(one)), atol=2e-4, rtol=1e-4)


def test_what_stays():
    forward = rotate(width=24, rotated=16, queries=2, keys=1)
    forward.rotation.positions.zero_()
    assert torch.equal(on_cpu(forward).out, forward.x)
    forward.rotation.positions.fill_(3)
    changed = (on_cpu(forward).out != forward.x).any(dim=0).unflatten(0, (-1, 24))
    assert changed[:3, :16].all() and not changed[:, 16:].any() and not changed[3].any()


def test_a_table_of_far_places_is_exact():
    frequencies = torch.tensor([1.0, 1e-3], dtype=torch.float64)
    found = rotation_table(frequencies, 100_001)[100_000]
    wanted = torch.tensor([math.cos(1e5), math.cos(100.0), math.sin(1e5), math.sin(100.0)])
    torch.testing.assert_close(found, wanted, atol=1e-7, rtol=0.0)


@pytest.mark.parametrize("normed, value", [(False, math.nan), (True, math.nan), (True, math.inf)])
def test_what_is_not_finite_stays_in_its_head_and_poisons_the_scale(normed, value):
    forward = rotate(7, normed=normed, to=0.9)
    forward.x[3, 21] = value
    found = compare(forward)
    assert found.rounded.scale.isnan()
    bad = found.unrounded(run).isnan()
    assert bad[3, 16:32].any() and bad[3, 16:32].sum() == bad.sum()


@pytest.mark.parametrize("normed", [False, True])
def test_an_empty_batch(normed, compared):
    forward = rotate(0, normed=normed, to=1.0)
    assert compared(forward).rounded.scale.item() == pytest.approx(1 / 127)
    found = compared(gradient_of(forward))
    assert not found.dx.sum.any() and not (normed and found.dquery.any())


def test_limits_of_places():
    forward = rotate()
    assert forward.limits() == gradient_of(forward).limits() == {"rotation.positions": PLACES}


def test_heads_that_kernels_do_not_have_are_refused_on_cuda():
    for options in ({"width": 12, "rotated": 8}, {"width": 24, "rotated": 24}):
        with refused("columns of which .* are rotated cannot run on CUDA.*multiple of 8.* of 16"):
            rotate(**options).cuda()
