"""Gradients that are written into DDP's buckets on a device whose kernels write to multiples of 16
bytes alone."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lsq.dist import GradientCompression, compress_gradients
from lsq.layers import TransformerEncoderLayer
from tests.device.standin import PLACE, ordered
from tests.device.watch import watched
from tests.dist.net import config
from tests.dist.test_device_groups import device, on_device
from tests.layers.shapes import HIDDEN, config_of

__all__ = ["device"]


def train(rank: int, copied: bool) -> list[tuple[torch.Tensor, int, list[bool]]]:
    """(gradients, launches of PyTorch, which parameters' gradients can be written to) of steps."""
    torch.manual_seed(1)
    layer = TransformerEncoderLayer(config_of(backward="int8")).to(PLACE)
    model = DistributedDataParallel(layer, gradient_as_bucket_view=True)
    if copied:
        GradientCompression.write_into_buckets = lambda self: None
    compress_gradients(model, config("int8"))
    found = []
    for step in range(4):
        x = torch.randn(
            5, 3, HIDDEN, generator=torch.Generator().manual_seed(100 * rank + step)
        ).to(PLACE)
        torch.manual_seed(10 * rank + step)
        layer.zero_grad()
        with ordered(), watched() as record:
            model(x).square().mean().backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        aligned = [gradient.data_ptr() % 16 == 0 for gradient in gradients]
        found.append(
            (torch.cat([one.flatten() for one in gradients]).cpu(), len(record.launches), aligned)
        )
    return found


@pytest.mark.thorough
def test_gradients_that_can_be_are_written_into_their_buckets():
    spared, copied = on_device(train, 2, False), on_device(train, 2, True)
    for of_rank, others in zip(spared, copied, strict=True):
        for step, ((found, launches, aligned), (wanted, more, _)) in enumerate(
            zip(of_rank, others, strict=True)
        ):
            assert torch.equal(found, wanted), step
            if (
                step == 3
                # the second step is the last with other buckets, the third the first without
                # measuring
            ):
                assert 0 < sum(aligned) < len(aligned)
                assert more - launches == sum(aligned), (more, launches, aligned)
