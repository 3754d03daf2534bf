"""Products of logarithmic numbers by integers, as hardware could sum them: exact up to the end.

A product of two values of log<n>.<m> has the sum of both exponents, in units of 2^-m. The fraction
of the sum picks one of 2^m bins, its whole part shifts an integer 1, which is added to the bin. At
the end each bin is multiplied by the power of its fraction (Dally 2023). M and N rows, K columns.
"""

import math
import re

import torch
from torch import Tensor


def logarithmic_product(x: Tensor, weight: Tensor, number: str) -> Tensor:
    """Return float64 [M, N]: the products of the values of codes x [M, K] and weight [N, K].

    The bins are exact, the result to 2^-51 of the sum of magnitudes. NaN makes NaN. Products of
    decoded float32 values err by (K + 2) 2^-24 of that sum at most, to first order: by 2^-24 for
    each value, each product and each of K - 1 sums. Raises ValueError: `number` is not logarithmic.
    """
    parts = re.fullmatch(r"log([1-7])\.([0-6])", number)
    if not parts:
        raise ValueError(f"number is {number!r}; give a logarithmic one, such as 'log4.3'")
    whole, fraction = map(int, parts.groups())
    sign_code = 2 ** (whole + fraction)  # alone it is NaN; 0 is zero
    result = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for row, a in enumerate(x.tolist()):
        for column, b in enumerate(weight.tolist()):
            bins = [0] * 2**fraction
            for left, right in zip(a, b, strict=True):
                exponent = left % sign_code + right % sign_code
                if left % sign_code and right % sign_code:
                    term = 1 << (exponent >> fraction)
                    negative = (left < sign_code) != (right < sign_code)
                    bins[exponent % 2**fraction] += -term if negative else term
            total = math.fsum(one * 2 ** (i / 2**fraction) for i, one in enumerate(bins))
            # code 2^(n + m) - 1 stands for 1
            result[row, column] = total / 2 ** (2 * (sign_code - 1) / 2**fraction)
    missing = [(codes == sign_code).any(1) for codes in (x, weight)]
    return result.masked_fill(missing[0][:, None] | missing[1], math.nan)
