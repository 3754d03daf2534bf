"""Three values."""

from lsq.quant.numbers.number import NumberFormat


def ternary() -> NumberFormat:
    """-1, 0 and 1 as codes 0, 1 and 2, five of them to a byte: 1.6 bits each.

    Error: at most 1/2 of the scale for what is not clipped. Under the clip of least squared error
    these are the ternary weights of Li et al. 2016 (arXiv:1605.04711), whose rule for threshold and
    scale approximates that. No NaN.
    """
    return NumberFormat(name="ternary", values=(-1.0, 0.0, 1.0))
