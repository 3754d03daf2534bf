"""Values that are found by the upper half of a float's bits, against rounding by all boundaries."""

import pytest
import torch

from lsq.quant.numbers import NUMBERS, NumberFormat, number_format
from lsq.quant.numbers.lookup import LEVELS, RANKS, lookup


def nearest(number: NumberFormat, x: torch.Tensor) -> torch.Tensor:
    """As loops and kernels do it."""
    table = lookup(number, x.device)
    boundaries, values = table[RANKS:].view(torch.float32).view(2, LEVELS)
    rank = table[(x.view(torch.int32) >> 16 & 0xFFFF).long()].long()
    return values[rank + (x > boundaries[rank]).long()]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_format_is_found(name):
    """Random bits, all boundaries' neighbours, zeros, subnormal floats and infinities."""
    number = number_format(name)
    bits = torch.randint(
        -(2**31), 2**31 - 1, (20000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    )
    usable = torch.tensor(sorted({value for value in number.values if abs(value) < 1e30}))
    middle = (usable[1:] + usable[:-1]) / 2
    edges = [torch.nextafter(middle, torch.tensor(end)) for end in (-9e9, 9e9)]
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, torch.inf, -torch.inf])
    x = torch.cat(
        [
            bits.view(torch.float32),
            usable,
            middle,
            *edges,
            torch.randn(5000) * number.largest / 2,
            special,
        ]
    )
    x = x[~x.isnan()]
    assert torch.equal(nearest(number, x), number.decode(number.encode(x)))


def test_boundaries_that_lie_too_close_are_refused():
    number = NumberFormat(name="close", values=(1.0, 1.001, 1.002, 1.003))
    with pytest.raises(ValueError, match="close lie closer than a part in 128"):
        lookup(number, torch.device("cpu"))
