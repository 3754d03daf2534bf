"""Codebooks: values that were chosen for a distribution. Codes number them from the smallest on."""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lsq.quant.numbers.number import NumberFormat

Integrals = tuple[Tensor, Tensor, Tensor]
"""Of a density from `a` on: its mass, first and second moment, float64 in the shape of a."""


def nf4() -> NumberFormat:
    """NF4: 16 quantiles of a Gaussian, 0 among them, scaled to [-1, 1] (Dettmers et al. 2023,
    arXiv:2305.14314).

    8 values are above 0 and 7 below, so that it is not symmetric: 1 and -1 are both there. Error:
    at most half of the widest gap, 0.152, for what is not clipped. No NaN.
    """
    # in the middle between the last quantiles of 16 and of 15 values
    last = 1 - (1 / 32 + 1 / 30) / 2
    positive = torch.special.ndtri(torch.linspace(0.5, last, 9, dtype=torch.float64, device="cpu"))
    negative = -torch.special.ndtri(
        torch.linspace(0.5, last, 8, dtype=torch.float64, device="cpu")
    )[1:]
    values = torch.cat([negative, positive]).sort().values / positive[-1]
    return NumberFormat(name="nf4", values=tuple(values.tolist()))


def _gaussian(a: Tensor) -> Integrals:
    density = torch.exp(-a.square() / 2) / math.sqrt(2 * math.pi)
    mass = torch.special.ndtr(-a)
    return mass, density, mass + a.nan_to_num(posinf=0.0) * density


def _laplacian(a: Tensor) -> Integrals:
    decay = torch.exp(-math.sqrt(2) * a) / 2
    a = a.nan_to_num(posinf=0.0)
    return decay, decay * (a + math.sqrt(1 / 2)), decay * (a.square() + math.sqrt(2) * a + 1)


SOURCES: dict[str, Callable[[Tensor], Integrals]] = {"gaussian": _gaussian, "laplacian": _laplacian}
"""Densities of mean 0 and variance 1, as lloyd_max knows them."""
ITERATIONS = 20_000
"""At most so many of lloyd_max, of which 6 bits take 7,000 and 4 bits 600."""


def lloyd_max(source: str, bits: int) -> NumberFormat:
    """The 2^bits values of least squared error for a source of variance 1 (Max 1960; Lloyd 1957,
    published 1982).

    A scale is then what the standard deviation is; the largest value lies at a few of them. There
    is no 0 among the values. Error: unbounded beyond the largest; on average the published
    distortions. No NaN.

    Raises:
        ValueError: `source` is not in SOURCES, or `bits` is not from 1 to 6.
    """
    if source not in SOURCES or not isinstance(bits, int) or not 1 <= bits <= 6:
        raise ValueError(
            f"no Lloyd-Max values for source {source!r} and {bits!r} bits; allowed:"
            f" {', '.join(map(repr, SOURCES))}, "
            "and 1 to 6 bits"
        )
    positive, _ = _lloyd(source, 2 ** (bits - 1))
    return NumberFormat(
        name=f"lloyd{bits}-{source}", values=(*(-value for value in positive[::-1]), *positive)
    )


def lloyd_max_distortion(source: str, bits: int) -> float:
    """Mean squared error of lloyd_max(source, bits) on its source, whose variance is 1."""
    return _lloyd(source, 2 ** (bits - 1))[1]


@cache
def _lloyd(source: str, levels: int) -> tuple[tuple[float, ...], float]:
    """(the values above 0, the distortion): both densities are log-concave, so that the only
    optimum is symmetric."""
    integrals = SOURCES[source]
    values = torch.linspace(0.5, levels - 0.5, levels, dtype=torch.float64, device="cpu") * (
        4 / levels
    )
    for _ in range(ITERATIONS):
        edges = torch.cat(
            [values.new_zeros(1), (values[1:] + values[:-1]) / 2, values.new_full((1,), math.inf)]
        )
        mass, first, second = (part[:-1] - part[1:] for part in integrals(edges))
        before, values = values, first / mass
        if torch.allclose(values, before, rtol=0.0, atol=1e-10):
            break
    distortion = 2 * (second - 2 * values * first + values.square() * mass).sum()
    return tuple(values.tolist()), float(distortion)


def fit_codebook(
    x: Tensor, bits: int, *, name: str = "kmeans", iterations: int = 100
) -> NumberFormat:
    """2^bits values, symmetric about 0 with 0 among them, fitted to x in units of its own scale.

    k-means in one dimension (Lloyd's iteration on a sample) of magnitudes, started at their
    quantiles. 0 is one of the values and so is its negative, -0: 2^bits - 1 values differ. Their
    largest is at most the largest |x|. Error: at most half of the gap that the value lies in.

    Args:
        x: any shape and float dtype, what is not finite is left out; divide it by its scales
            before.
        bits: 2 to 8.

    Raises:
        ValueError: `bits` is not from 2 to 8, or fewer magnitudes above 0 differ than there are
            values to find.
    """
    if not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ValueError(f"bits is {bits!r}; a codebook has 2 to 8")
    levels = 2 ** (bits - 1) - 1
    sample = x.detach().double().flatten().abs()
    sample = sample[sample.isfinite()].sort().values
    found = sample[sample > 0].unique()
    if found.numel() < levels:
        raise ValueError(
            f"{found.numel()} magnitudes above 0 differ in x (shape {list(x.shape)}), too few for"
            f" {levels} values of "
            f"{bits} bits; give it a larger sample or fewer bits"
        )
    sums = torch.nn.functional.pad(sample.cumsum(0), (1, 0))
    spread = (
        torch.linspace(0.5, levels - 0.5, levels, dtype=torch.float64, device=x.device) / levels
    )
    values = found[(spread * found.numel()).long()]
    for _ in range(iterations):
        edges = torch.cat([values[:1] / 2, (values[1:] + values[:-1]) / 2])
        start = torch.searchsorted(sample, edges)
        end = torch.cat([start[1:], start.new_full((1,), sample.numel())])
        count = end - start
        before = values
        values = torch.where(count > 0, (sums[end] - sums[start]) / count, values)
        if torch.equal(values, before):
            break
    positive = values.tolist()
    return NumberFormat(
        name=f"{name}{bits}", values=(0.0, *positive, -0.0, *(-value for value in positive))
    )
