"""What the tests of layers share: small configurations, masks, and loops over them."""

import torch

from lsq.config import LayerConfig, QuantConfig

HIDDEN, HEADS, INNER = 48, 3, 112


def config_of(*, dropout=0.0, pre_norm=False, activation="relu", heads=HEADS, hidden=HIDDEN, inner=INNER, **quant):
    """A LayerConfig with one dropout for all places; what remains goes to QuantConfig."""
    return LayerConfig(
        hidden=hidden, heads=heads, feed_forward=inner, dropout=dropout, attention_dropout=dropout,
        activation_dropout=dropout, pre_norm=pre_norm, activation=activation, quant=QuantConfig(**quant),
    )


def padding_mask(batch: int, time: int) -> torch.Tensor:
    """bool [B, T]: two more tokens of each next sentence are padding; every sentence keeps one."""
    lengths = torch.tensor([max(1, time - 2 * i) for i in range(batch)])
    return torch.arange(time) >= lengths[:, None]


def gradients(module, output, *inputs) -> dict[str, torch.Tensor]:
    """Gradients of a fixed random weighting of `output`, by parameter name; inputs are "input 0" and so on."""
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(7))
    names = [f"input {i}" for i in range(len(inputs))] + [name for name, _ in module.named_parameters()]
    found = torch.autograd.grad(output, [*inputs, *module.parameters()], upstream)
    return dict(zip(names, found, strict=True))
