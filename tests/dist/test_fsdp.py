"""Int8ReduceScatter under FSDP2: gradients near those of FSDP2's own reduce-scatter, and what it
refuses."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed import ReduceOp
from torch.distributed.fsdp import fully_shard

from lsq.dist import GradientConfig
from lsq.dist.fsdp import Int8ReduceScatter, compress_reduce_scatter
from tests.dist.processes import run


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 53), nn.ReLU(), nn.Linear(53, 7))


def gradients(rank: int, compressed: bool) -> list[torch.Tensor]:
    """The whole gradients of one step of FSDP2."""
    net = model()
    for layer in (net[0], net[2]):
        fully_shard(layer)
    fully_shard(net)
    if compressed:
        compress_reduce_scatter(net, GradientConfig(mode="int8"))
    torch.manual_seed(rank)
    net(torch.randn(5, 37)).square().sum().backward()
    return [parameter.grad.full_tensor() for parameter in net.parameters()]


class Uneven(nn.Module):
    """Tensors of 1 and 15 values whose gradients are a millionth of those of the 16 and 9,000
    values around them."""

    def __init__(self):
        super().__init__()
        sizes = {"first": 3000, "one": 1, "fifteen": 15, "sixteen": 16, "last": 6000, "unused": 1}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its gradients are pieces of `x` [9032], the small ones times 1e-6."""
        parts = zip(
            (self.first, self.one, self.fifteen, self.sixteen, self.last),
            x.split(SIZES),
            strict=True,
        )
        return sum((own * part).sum() * (1e-6 if own.numel() < 16 else 1) for own, part in parts)


SIZES = [3000, 1, 15, 16, 6000]


def uneven_gradients(rank: int) -> dict[str, torch.Tensor]:
    net = fully_shard(Uneven())
    compress_reduce_scatter(net)
    x = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(rank))
    net(x).backward()
    return {
        name: one.grad.full_tensor() for name, one in net.named_parameters() if one.grad is not None
    }


def test_gradients_of_small_tensors_are_not_rounded():
    """Those of 15 values are as exact as floats; those of 16 are rounded as all others; 3 processes
    divide nothing."""
    found = run(uneven_gradients, 3)
    pieces = [
        torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(rank)) for rank in range(3)
    ]
    means = torch.stack(pieces).double().mean(0).split(SIZES)
    wanted = dict(zip(("first", "one", "fifteen", "sixteen", "last"), means, strict=True))
    for of_rank in found:
        assert of_rank.keys() == wanted.keys()
        for name, mean in wanted.items():
            if name in ("one", "fifteen"):
                torch.testing.assert_close(of_rank[name].double(), mean * 1e-6, rtol=1e-6, atol=0)
            else:
                assert 1e-4 < (of_rank[name] - mean).norm() / mean.norm() < 0.02


def test_gradients_of_fsdp2_are_near_exact():
    exact, rounded = run(gradients, 2, False), run(gradients, 2, True)
    for wanted, found in zip(exact[0], rounded[0], strict=True):
        assert (found - wanted).norm() <= 0.01 * wanted.norm()
        assert torch.equal(found, wanted) == (wanted.numel() < 16)


def reduced(
    rank: int, values: int, dtype: torch.dtype, op_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    given = torch.randn(2 * values).to(dtype)
    if rank == 1 and values > 3:
        given[3] = torch.inf
    out = torch.empty(values, dtype=dtype)
    Int8ReduceScatter()(out, given, distributed.group.WORLD, getattr(ReduceOp, op_name))
    return given, out


@pytest.mark.parametrize(
    ("values", "dtype", "op"),
    [(1, torch.float32, "SUM"), (64, torch.bfloat16, "AVG"), (1001, torch.bfloat16, "SUM")],
)
def test_each_worker_gets_its_sum_and_what_is_not_finite_stays_so(values, dtype, op):
    results = run(reduced, 2, values, dtype, op)
    for rank, (_, out) in enumerate(results):
        parts = torch.stack([given.float().view(2, values)[rank] for given, _ in results])
        wanted = parts.sum(0) if op == "SUM" else parts.mean(0)
        poisoned = rank == 0 and values > 3
        assert bool(out[3 % values].isfinite()) == (not poisoned)
        fine = out.isfinite()
        assert fine.sum() >= values - 128 * poisoned
        step = parts[:, fine].abs().max() / 127 if fine.any() else 0.0
        assert ((out.float() - wanted).abs()[fine] <= 1.01 * step + 0.01 * wanted[fine].abs()).all()


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="mode gcq"):
        compress_reduce_scatter(model(), GradientConfig(mode="gcq"))
    with pytest.raises(ValueError, match="no FSDP2 module"):
        compress_reduce_scatter(model())


def refused(rank: int) -> list[str]:
    messages = []
    for dtype, op in ((torch.float32, ReduceOp.MAX), (torch.float64, ReduceOp.SUM)):
        try:
            Int8ReduceScatter()(
                torch.empty(3, dtype=dtype),
                torch.empty(3, dtype=dtype),
                distributed.group.WORLD,
                op,
            )
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_operations_and_dtypes_that_cannot_be_are_named():
    ((about_op, about_dtype),) = run(refused, 1)
    assert "MAX" in about_op and "SUM and AVG" in about_op
    assert "torch.float64" in about_dtype and "reduce_dtype" in about_dtype
