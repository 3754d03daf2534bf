"""Arithmetic that devices share, in its faster forms."""

import torch

from tests.emulator.emulated import Module


def test_bounded_exponential():
    """Every exponent and sign, with many mantissas; the ends of its range; what is not finite."""
    mantissas = torch.randint(0, 2**23, (256, 400), dtype=torch.int32)
    magnitudes = mantissas + (torch.arange(256, dtype=torch.int32) << 23)[:, None]
    ends = torch.tensor([0.0, -87.0, -87.00001, 88.0, torch.nan, -torch.inf])
    x = torch.cat(
        [magnitudes.flatten().view(torch.float32), -magnitudes.flatten().view(torch.float32), ends]
    )
    x = torch.cat([x, -90 * torch.rand(50_000)])
    x = x[~(x > 88.0)].contiguous()
    found = torch.full(x.shape, -1.0)
    module = Module("arithmetic.cu")
    module.launch(
        "exponentials", -(-x.numel() // 256), 256, x.data_ptr(), found.data_ptr(), x.numel()
    )
    exact = x.double().exp()
    seen = x >= -87.0
    assert (found[x < -87.0] == 0.0).all() and found[x.isnan()].isnan().all() and x.isnan().any()
    assert ((found.double() - exact).abs() / exact)[seen].max() < 2.4e-7
    assert (found[x == 0.0] == 1.0).all()
