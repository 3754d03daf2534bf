"""What the tests of layers share: small configurations, masks, and loops over them."""

import torch

from lsq.config import LayerConfig, RelativeBias, Rotary
from tests.constants import quant_with

HIDDEN, HEADS, INNER = 48, 3, 112
ATTENTIONS = {
    "grouped": {"heads": 6, "kv_heads": 3, "head_width": 16},
    "rotary": {"rotary": Rotary(positions=64)},
    "half of a head turns": {"rotary": Rotary(positions=64, width=8, base=500.0)},
    "normed heads": {"rotary": Rotary(positions=64), "qk_norm": 1e-6},
    "window": {"window": 3},
    "biases": {"relative_bias": RelativeBias(buckets=8, farthest=6), "softmax_scale": 1.0},
    "all": {
        "heads": 4,
        "kv_heads": 2,
        "head_width": 8,
        "rotary": Rotary(positions=64),
        "qk_norm": 1e-5,
        "window": 4,
        "relative_bias": RelativeBias(),
    },
}
"""What else a LayerConfig may say of self-attention."""


def config_of(
    *,
    dropout=0.0,
    pre_norm=False,
    norm="layer",
    activation="relu",
    heads=HEADS,
    hidden=HIDDEN,
    inner=INNER,
    gated=False,
    bias=True,
    attention=(),
    **quant,
):
    """A LayerConfig with one dropout, and `attention` besides; the rest goes to quant_with.

    By default products of the backward pass are of floats, so that nothing is random, and the first
    pass alone measures clips.
    """
    quant = {"backward": "float", "calibration_passes": 0, **quant}
    given = {"hidden": hidden, "heads": heads, "feed_forward": inner, **dict(attention)}
    return LayerConfig(
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
        pre_norm=pre_norm,
        norm=norm,
        activation=activation,
        gated=gated,
        bias=bias,
        quant=quant_with(**quant),
        **given,
    )


def padding_mask(batch: int, time: int) -> torch.Tensor:
    """bool [B, T]: two more tokens of each next sentence are padding; every sentence keeps one."""
    lengths = torch.tensor([max(1, time - 2 * i) for i in range(batch)])
    return torch.arange(time) >= lengths[:, None]


def gradients(module, output, *inputs) -> dict[str, torch.Tensor]:
    """Gradients of a fixed random weighting of `output`, by name; inputs are "input 0" and so
    on."""
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(7))
    parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
    names = [*(f"input {i}" for i in range(len(inputs))), *parameters]
    found = torch.autograd.grad(output, [*inputs, *parameters.values()], upstream)
    return dict(zip(names, found, strict=True))


def assert_unbiased(exact, drawn, exempt=()):
    """Means of drawn gradients lie within 5.5 standard errors of `exact`; all but `exempt` vary."""
    for name, expected in exact.items():
        each = torch.stack([gradients[name] for gradients in drawn]).double()
        standard_error = each.std(dim=0) / len(drawn) ** 0.5
        allowed = 5.5 * standard_error + 1e-5 * expected.abs().max()
        ratio = ((each.mean(dim=0) - expected).abs() / allowed.clamp_min(1e-30)).max()
        assert ratio <= 1, f"{name}: the mean is off by {ratio:.2f} of what is allowed"
        assert name in exempt or standard_error.max() > 0, f"{name} is not rounded at random"


def decibels(exact, rounded) -> float:
    """Signal-to-noise ratio of one gradient."""
    noise = (rounded - exact).norm().clamp_min(1e-20)
    return (20 * torch.log10(exact.norm() / noise)).item()
