"""Arithmetic that devices share: its faster forms give the same bits."""

import torch

from tests.csrc.emulated import Module


def test_bounded_exponential_has_the_bits_of_exponential():
    """Every exponent and sign, with many mantissas; the ends of its range; what is not finite."""
    mantissas = torch.randint(0, 2**23, (256, 400), dtype=torch.int32)
    magnitudes = mantissas + (torch.arange(256, dtype=torch.int32) << 23)[:, None]
    ends = torch.tensor([0.0, -87.3, -87.30001, 88.0, torch.nan, -torch.inf])
    x = torch.cat([magnitudes.flatten().view(torch.float32), -magnitudes.flatten().view(torch.float32), ends])
    x = torch.cat([x, -90 * torch.rand(50_000)])
    x = x[~(x > 88.0)].contiguous()
    differs = torch.full(x.shape, 85, dtype=torch.uint8)
    module = Module("arithmetic.cu")
    module.launch("exponentials", -(-x.numel() // 256), 256, x.data_ptr(), differs.data_ptr(), x.numel())
    assert not differs.any(), x[differs != 0][:5]
