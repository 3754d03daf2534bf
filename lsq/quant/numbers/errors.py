"""How far values in a format are from what they were."""

import math

from torch import Tensor


def signal_to_noise(x: Tensor, found: Tensor) -> float:
    """10 log10 of the squares of x over those of x - found, in decibels; of the same shape.

    Infinite where nothing differs, NaN where there is neither signal nor noise, or a NaN.
    """
    signal = float(x.double().square().sum())
    noise = float((x.double() - found.double()).square().sum())
    if noise == 0 or signal == 0:
        return math.inf if signal > 0 else math.nan if noise == 0 else -math.inf
    return 10 * math.log10(signal / noise)
