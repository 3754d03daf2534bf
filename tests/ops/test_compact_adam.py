"""Adam on codes: its definition in float64, equal codes on every backend, and random rounding."""

import pytest
import torch

from lsq.ops.adam import scalars
from lsq.ops.compact_adam import CompactAdam, MasterWeight, Moment, SplitWeight
from lsq.quant import compact
from tests.ops import cuda
from tests.ops.compare import KEY

RATE, BETAS, EPSILON = 3e-3, (0.9, 0.99), 1e-6
SHAPES = [(1, 16), (7, 48), (33, 256), (5, 520), (40, 1024)]
KINDS = ["floats", "codes", "codes and remainders"]


def weight_of(kind: str, values: torch.Tensor) -> MasterWeight:
    if kind == "floats":
        return MasterWeight(floats=values.clone())
    codes, remainder, scale = compact.split_weight(
        values, torch.ones(len(values)), remainder=kind != "codes"
    )
    return MasterWeight(codes=codes, remainder=remainder, scale=scale)


def moments_of(first: torch.Tensor, second: torch.Tensor, bits: int) -> tuple[Moment, Moment]:
    if bits == 32:
        return Moment(floats=first.clone()), Moment(floats=second.clone())
    encoded = compact.encode_first(first), compact.encode_second(second.sqrt())
    return tuple(Moment(codes=codes, scale=scale) for codes, scale in encoded)


def step(shape, kind: str, bits: int, *, gradient: torch.Tensor | None = None) -> CompactAdam:
    """A step in the middle of a training."""
    values, first, second = torch.randn(shape), 0.1 * torch.randn(shape), 0.1 * torch.rand(shape)
    first, second = moments_of(first, second, bits)
    return CompactAdam(
        weight=weight_of(kind, values),
        first=first,
        second=second,
        gradient=torch.randn(shape) if gradient is None else gradient,
        numbers=scalars(RATE, BETAS, EPSILON, 3, weight_decay=0.1, torch_epsilon=True),
        gradient_factor=torch.tensor([0.5]),
        key=KEY,
    )


def copied(operation: CompactAdam) -> CompactAdam:
    return operation.bind(lambda one: one if one is None else one.clone())


def values(operation: CompactAdam) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weight, first moment, root of the second moment)"""
    first, second = operation.first, operation.second
    return (
        operation.weight.values(),
        compact.decode_first(first.codes, first.scale) if first.floats is None else first.floats,
        compact.decode_second(second.codes, second.scale)
        if second.floats is None
        else second.floats.sqrt(),
    )


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_backends_write_the_same_codes(shape, kind, bits):
    operation = step(shape, kind, bits)
    found = copied(operation)
    operation.store(operation.reference())
    found.cpu()
    for leaf in CompactAdam.leaves():
        ours, theirs = leaf.of(found), leaf.of(operation)
        if ours is None or not leaf.written:
            continue
        if ours.is_floating_point():
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        else:
            # a value may lie on the border of two codes
            differ = (ours.int() - theirs.int()) != 0
            assert differ.sum() <= max(1, differ.numel() // 1000)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_split_alike(shape, kind):
    values = torch.randn(shape)
    values[0, 0] = 0.0 if shape[0] == 1 else float("nan")
    operations = [
        SplitWeight(values=values, weight=weight_of(kind, torch.ones(shape))) for _ in range(2)
    ]
    operations[0].store(operations[0].reference())
    operations[1].cpu()
    for name in ("codes", "remainder", "scale"):
        one, other = (getattr(operation.weight, name) for operation in operations)
        if one is None:
            assert other is None
        elif name == "scale":
            assert torch.equal(one.nan_to_num(), other.nan_to_num())
        else:  # a value may lie on the border of two codes
            assert (one != other).sum() <= max(1, one.numel() // 1000)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_adams_but_for_rounding(kind, bits):
    """The definition, in float64, from what the codes hold."""
    operation = step((9, 300), kind, bits)
    weight, first, root = (one.double() for one in values(operation))
    size, lack1, lack2, epsilon, decay = operation.numbers.double()
    gradient = operation.gradient.double() * 0.5
    first = first * (1 - lack1) + gradient * lack1
    second = root.square() * (1 - lack2) + gradient.square() * lack2
    weight = weight - weight * decay - size * first / (second.sqrt() + epsilon)
    operation.cpu()
    found = values(operation)
    allowed = {"floats": 1e-6, "codes": 1 / 127, "codes and remainders": 1 / 127 / 254}[kind]
    allowed = allowed * weight.abs().amax(1, keepdim=True) * 1.01
    assert ((found[0] - weight).abs() <= allowed).all()
    assert ((found[1] - first).abs() <= (1e-6 if bits == 32 else 0.02 * first.abs().max())).all()
    root = second.sqrt()
    assert ((found[2] - root).abs() <= (1e-6 if bits == 32 else 0.01 * root.max())).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_shows(kind):
    gradient = torch.randn(6, 600)
    gradient[2, 5], gradient[4, 599] = float("nan"), float("inf")
    operation = step((6, 600), kind, 8, gradient=gradient)
    operation.cpu()
    found = operation.weight.values()
    assert found.isnan().any(1).nonzero().flatten().tolist() == [2, 4]
    lost = operation.first.scale.isfinite().logical_not().nonzero().tolist()
    assert lost == [[2, 0], [4, 2]]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_small_steps_survive_on_average(kind):
    """A step of a hundredth of a code moves a weight, after many, by as much as floats."""
    values, rounds = 0.9 * torch.rand(4, 256).copysign(torch.randn(4, 256)), 400
    values[:, 0] = 1.0
    operation = step((4, 256), kind, 32, gradient=torch.ones(4, 256))
    operation.weight = weight_of(kind, values)
    operation.first.floats.fill_(1.0), operation.second.floats.fill_(1.0)
    unit = 1 / 127 / (254 if kind != "codes" else 1)
    operation.numbers = torch.tensor([0.01 * unit, 0.0, 0.0, 0.0, 0.0])
    operation.gradient_factor = torch.ones(1)
    for number in range(rounds):
        operation.key = torch.tensor([number])
        operation.bind(lambda one: one).cpu()
    moved = ((values - operation.weight.values()) / unit)[:, 1:]
    assert abs(moved.mean() - 0.01 * rounds) < 0.5


def test_a_step_is_the_same_with_any_number_of_threads():
    found = []
    for threads in (1, 2):
        torch.manual_seed(3)
        operation = step((64, 512), "codes and remainders", 8)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        operation.cpu()
        torch.set_num_threads(before)
        found.append(values(operation))
    assert all(map(torch.equal, *found))


def compare_kernel(operation: CompactAdam) -> None:
    """The kernel, in two orders of threads, writes what the CPU writes, bit by bit."""
    found = [cuda.run(operation, order=order) for order in cuda.ORDERS]
    operation.cpu()
    for leaf in CompactAdam.leaves():
        wanted = leaf.of(operation)
        if leaf.written and wanted is not None:
            for one in found:
                torch.testing.assert_close(leaf.of(one), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 48), (5, 520)])
def test_kernels_write_the_codes_of_the_cpu(shape, kind, bits):
    compare_kernel(step(shape, kind, bits))


def turns():
    """Three blocks of columns for each warp."""
    for kind in KINDS:
        gradient = torch.randn(3, 6160)
        gradient[0, 5], gradient[1, 6159] = float("nan"), float("inf")
        compare_kernel(step((3, 6160), kind, 8, gradient=gradient))
