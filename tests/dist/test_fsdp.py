"""Int8ReduceScatter under FSDP2: gradients near those of FSDP2's own reduce-scatter, and what it
refuses."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed import ReduceOp
from torch.distributed.fsdp import fully_shard

from lsq.dist import GradientConfig
from lsq.dist.fsdp import Int8ReduceScatter, compress_reduce_scatter
from tests.dist.net import Uneven, pieces
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


class WithUnused(Uneven):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))


def uneven_gradients(rank: int) -> dict[str, torch.Tensor]:
    net = fully_shard(WithUnused())
    compress_reduce_scatter(net)
    net(pieces(rank)).backward()
    return {
        name: one.grad.full_tensor() for name, one in net.named_parameters() if one.grad is not None
    }


def test_gradients_of_small_tensors_are_not_rounded():
    """Those of 15 values are as exact as floats; those of 16 are rounded as all others; 3 processes
    divide nothing."""
    mean = torch.stack([pieces(rank) for rank in range(3)]).double().mean(0)
    wanted = dict(zip(Uneven.SIZES, Uneven.parts(mean), strict=True))
    for of_rank in run(uneven_gradients, 3):
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


def refused(rank: int) -> None:
    for dtype, op, message in (
        (torch.float32, ReduceOp.MAX, "MAX.*SUM and AVG"),
        (torch.float64, ReduceOp.SUM, "torch.float64.*reduce_dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            given, out = torch.empty(2, 3, dtype=dtype)
            Int8ReduceScatter()(out, given, distributed.group.WORLD, op)


def test_operations_and_dtypes_that_cannot_be_are_named():
    run(refused, 1)
