"""Number formats as tables of at most 256 values: integers, small floats, logarithms, codebooks.

All of them share one rounding: a float becomes the code of the nearest value. Loops and kernels
look it up by the upper half of a float's bits (`lookup`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from lsq.quant.arithmetic import maximum_code


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """Codes and their values.

    Rounding is monotone and idempotent, and symmetric about zero if the values are. A float halfway
    between two values becomes the value of even rank by magnitude: for integers and floats, the
    even value. Floats beyond the largest value, infinities among them, become the largest. NaN
    becomes the code whose value is NaN. If there is none, it becomes the code of zero, and the
    scale must be NaN (ScaledFormat).
    """

    name: str
    values: tuple[float, ...]
    """Value of each code. No finite float is rounded to an infinity or NaN."""

    def __post_init__(self) -> None:
        usable = {value for value in self.values if math.isfinite(value)}
        if not 2 <= len(self.values) <= 256 or len(usable) < 2:
            raise ValueError(
                f"{self.name} has {len(self.values)} codes for {len(usable)} finite values; give it"
                " 2 to 256 codes for at least 2 values"
            )

    @cached_property
    def word(self) -> tuple[int, int]:
        """(codes, bytes) of the least whole number of bytes that codes fill: (8, 3) for 3 bits,
        or (5, 1) for 3 codes, of which more fit into a byte than two bits would allow."""
        shared = math.gcd(self._width, 8)
        if self._radix != 2**self._width:
            return int(math.log(256, self._radix)), 1
        return 8 // shared, self._width // shared

    @property
    def _width(self) -> int:
        return (len(self.values) - 1).bit_length()

    @property
    def _radix(self) -> int:
        """What the digits of a word count by: the number of codes, if that saves room."""
        count = len(self.values)
        return count if 8 / self._width < int(math.log(256, count)) else 2**self._width

    @cached_property
    def largest(self) -> float:
        """The largest magnitude of a finite value."""
        return max(abs(value) for value in self.values if math.isfinite(value))

    def encode(self, x: Tensor) -> Tensor:
        """Return the codes uint8 of float x, in units of the scale; computed in float32."""
        boundaries, codes, missing = (part.to(x.device) for part in boundaries_of(self.values))
        x = x.float().contiguous()
        nearest = codes[torch.bucketize(x, boundaries, out_int32=True)]
        return torch.where(x.isnan(), missing, nearest)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the float32 values of integer codes, in their shape. Raises ValueError: a code is
        not one of this format."""
        low, high = map(int, codes.aminmax()) if codes.numel() else (0, 0)
        if low < 0 or high >= len(self.values):
            raise ValueError(
                f"codes of {self.name} are from 0 to {len(self.values) - 1}, not from {low} to"
                f" {high}"
            )
        return torch.tensor(self.values, dtype=torch.float32, device=codes.device)[codes.int()]

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes, any shape, into uint8 [whole words]; a word's lowest digit is its first
        code."""
        count, stored = self.word
        flat = codes.flatten().to(torch.int64)
        digits = torch.nn.functional.pad(flat, (0, -flat.numel() % count)).view(-1, count)
        words = (digits * self._weights(codes.device)).sum(1, keepdim=True)
        shifts = 8 * torch.arange(stored, device=codes.device)
        return (words >> shifts & 255).to(torch.uint8).flatten()

    def unpack(self, packed: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """Invert `pack`: codes uint8 of this shape. Raises ValueError: the size is not theirs."""
        count, stored = self.word
        numel = math.prod(shape)
        wanted = -(-numel // count) * stored
        if packed.numel() != wanted:
            raise ValueError(
                f"{numel} codes of {self.name} (shape {list(shape)}) take {wanted} bytes, but"
                f" packed holds {packed.numel()}"
            )
        if stored == 1:  # by a table of all bytes, in a fraction of the time and memory
            every = torch.arange(256, device=packed.device)[:, None]
            digits = (every // self._weights(packed.device) % self._radix).to(torch.uint8)
            return digits.index_select(0, packed.int()).flatten()[:numel].view(shape)
        shifts = 8 * torch.arange(stored, device=packed.device)
        words = (packed.view(-1, stored).to(torch.int64) << shifts).sum(1, keepdim=True)
        digits = words >> self._width * torch.arange(count, device=packed.device) & self._radix - 1
        return digits.to(torch.uint8).flatten()[:numel].view(shape)

    def _weights(self, device: torch.device) -> Tensor:
        """Return the weight of each digit of a word."""
        return self._radix ** torch.arange(self.word[0], device=device)


@cache
def boundaries_of(values: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (boundaries float32 [V - 1], codes uint8 [V], NaN's code uint8 []) of V finite values.

    Both are in the order of the values, without repetitions. A float above boundary i - 1, and up
    to boundary i, becomes codes[i]. If a boundary itself belongs to the value above, it is moved
    down by one float.
    """
    code_of: dict[float, int] = {}
    for code, value in enumerate(values):
        if math.isfinite(value):
            code_of.setdefault(value, code)
    ordered = sorted(code_of)
    rank = {magnitude: i for i, magnitude in enumerate(sorted({abs(value) for value in ordered}))}
    with torch.device("cpu"):  # tables are kept, whatever the default device is
        levels = torch.tensor(ordered, dtype=torch.float64)
        middle = ((levels[1:] + levels[:-1]) / 2).float()
        upper = torch.tensor([rank[abs(value)] % 2 == 1 for value in ordered[:-1]])
        below = torch.nextafter(middle, torch.full_like(middle, -math.inf))
        missing = [code for code, value in enumerate(values) if math.isnan(value)]
        zero = code_of[min(ordered, key=abs)]
        codes = torch.tensor([code_of[value] for value in ordered], dtype=torch.uint8)
        of_nan = torch.tensor((missing or [zero])[0], dtype=torch.uint8)
        return torch.where(upper, below, middle), codes, of_nan


RANKS, LEVELS = 65536 + 64, 256
"""Bytes of the ranks, with room for reads beyond them; floats of each of the two lists behind."""


@cache
def lookup(number: NumberFormat, device: torch.device) -> Tensor:
    """Return the table uint8 [RANKS + 8 * LEVELS] of a format on a device, always the same memory.

    First come the ranks, a byte for each value of the upper 16 bits of a float (sign, exponent, 7
    bits of the mantissa): the number of boundaries below all floats with these bits. Then come
    boundaries and values, float32 [LEVELS] each, in order, filled up with infinity and the largest
    value. A float x whose bits have rank r becomes value r, or value r + 1 if x is above boundary
    r. Raises ValueError: several boundaries lie between floats with the same upper bits.
    """
    with torch.inference_mode(False), torch.device("cpu"):
        boundaries, codes, _ = boundaries_of(number.values)
        upper = torch.arange(65536, dtype=torch.int64) << 16
        ends = torch.stack([upper, upper | 0xFFFF])
        floats = torch.where(ends >= 2**31, ends - 2**32, ends).to(torch.int32).view(torch.float32)
        ranks = torch.bucketize(floats, boundaries)
        # the bits of infinity belong to infinity alone; other mantissas are NaN
        low, high = ranks.where(floats[1].isfinite(), ranks[0]).aminmax(dim=0)
        if (high - low).max() > 1:
            raise ValueError(
                f"boundaries between values of {number.name} lie closer than a part in 128: loops"
                " cannot round to it; leave values out that are so close"
            )
        values = torch.tensor(number.values, dtype=torch.float32)[codes.int()]
        table = torch.zeros(RANKS + 8 * LEVELS, dtype=torch.uint8)
        table[:65536] = low.to(torch.uint8)
        lists = table[RANKS:].view(torch.float32).view(2, LEVELS)
        lists[0] = torch.inf
        lists[0, : len(boundaries)] = boundaries
        lists[1] = values[-1]
        lists[1, : len(values)] = values
        return table.to(device)


def integer(bits: int) -> NumberFormat:
    """Return int<bits>: values from -Q to Q with Q = 2^(bits-1) - 1; codes are two's complement.

    Error: at most 1/2 of the scale for values that are not clipped. The code of -2^(bits-1) is
    never used, as in `quantize`, so that negating is safe and nothing is biased (Chen et al. 2025,
    arXiv:2510.25602, measure that). Raises ValueError: `bits` is no whole number from 2 to 8.
    """
    largest = maximum_code(bits)
    values = [*range(largest + 1), *range(-largest - 1, 0)]
    values[largest + 1] = -math.inf  # no float is rounded to this code
    return NumberFormat(name=f"int{bits}", values=tuple(map(float, values)))


def multiplier(bits: int) -> NumberFormat:
    """Return uint<bits>: multiples 1 to 2^bits - 1 of another scale; code 0 is NaN.

    Error: at most 1/2 above 1. VS-Quant's integer scales (Dai et al. 2021, arXiv:2102.04503), but
    never 0: a vector far below the largest of its channel is rounded coarsely, not to zeros.
    """
    return NumberFormat(name=f"uint{bits}", values=(math.nan, *map(float, range(1, 2**bits))))


def _small_float(exponent: int, mantissa: int) -> list[float]:
    """Return the values of all bit patterns (sign, exponent, mantissa), all of them finite."""
    bias = 2 ** (exponent - 1) - 1
    magnitudes = []
    for code in range(2 ** (exponent + mantissa)):
        power, fraction = divmod(code, 2**mantissa)
        whole = 1 if power else 0
        magnitudes.append(
            math.ldexp(whole * 2**mantissa + fraction, max(power, 1) - bias - mantissa)
        )
    return magnitudes + [-magnitude for magnitude in magnitudes]


def fp8_e4m3() -> NumberFormat:
    """Return E4M3: largest 448, smallest 2^-9, no infinities, NaN 0x7f (Micikevicius et al. 2022,
    arXiv:2209.05433).

    Error: at most 1/17 of the value from 2^-6 on, at most 2^-10 below; infinities are clipped.
    """
    values = _small_float(4, 3)
    values[0x7F] = values[0xFF] = math.nan
    return NumberFormat(name="fp8-e4m3", values=tuple(values))


def fp8_e5m2() -> NumberFormat:
    """Return E5M2: largest 57344, smallest 2^-16, infinities 0x7c and NaN 0x7d (the same paper).

    Error: at most 1/9 of the value from 2^-14 on, at most 2^-17 below; infinities are clipped.
    """
    values = _small_float(5, 2)
    for sign, start in ((1, 0x7C), (-1, 0xFC)):
        values[start : start + 4] = [sign * math.inf, math.nan, math.nan, math.nan]
    return NumberFormat(name="fp8-e5m2", values=tuple(values))


def fp4_e2m1() -> NumberFormat:
    """Return E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and negatives (OCP Microscaling Formats 1.0, 2023).

    Error: at most 1/5 of the value from 1 on, at most 1/4 below. No infinities, no NaN.
    """
    return NumberFormat(name="fp4-e2m1", values=tuple(_small_float(2, 1)))


def logarithmic(whole: int, fraction: int) -> NumberFormat:
    """Return log<n>.<m>: a sign and n whole and m fraction bits of the logarithm of the magnitude.

    Magnitudes are r^-k up to 1, with r = 2^(1 / 2^m). The code is the sign, then 2^(n + m) - 1 - k;
    magnitude code 0 is zero, and NaN with the sign. Dally 2023 ("Hardware for deep learning", Hot
    Chips) compares 4.3 and 5.2 with integers and floats of 8 bits. Rounding takes the nearest
    value, not the nearest logarithm.

    Error: at most (r - 1) / (r + 1) of the value: 4.3 % for m = 3, 8.6 % for m = 2. Below the
    smallest magnitude, r^-(2^(n + m) - 2), at most half of it. Infinities are clipped to 1.
    """
    largest = 2 ** (whole + fraction) - 1
    magnitudes = [2.0 ** ((code - largest) / 2**fraction) for code in range(1, largest + 1)]
    values = (0.0, *magnitudes, math.nan, *(-magnitude for magnitude in magnitudes))
    return NumberFormat(name=f"log{whole}.{fraction}", values=values)


def ternary() -> NumberFormat:
    """Return -1, 0 and 1 as codes 0, 1 and 2, five of them to a byte: 1.6 bits each.

    Error: at most 1/2 of the scale for values that are not clipped. Under the clip of least squared
    error these are the ternary weights of Li et al. 2016 (arXiv:1605.04711), whose rule for
    threshold and scale approximates that clip. No NaN.
    """
    return NumberFormat(name="ternary", values=(-1.0, 0.0, 1.0))


def nf4() -> NumberFormat:
    """Return NF4: 16 quantiles of a Gaussian, 0 among them, scaled to [-1, 1] (Dettmers et al.
    2023, arXiv:2305.14314).

    8 values are above 0 and 7 below, although 1 and -1 are both among them: it is not symmetric.
    Error: at most half of the widest gap, 0.152, for values that are not clipped. No NaN.
    """
    with torch.device("cpu"):
        # midway between the last quantiles of 16 and of 15 values
        last = 1 - (1 / 32 + 1 / 30) / 2
        positive = torch.special.ndtri(torch.linspace(0.5, last, 9, dtype=torch.float64))
        negative = -torch.special.ndtri(torch.linspace(0.5, last, 8, dtype=torch.float64))[1:]
        values = torch.cat([negative, positive]).sort().values / positive[-1]
    return NumberFormat(name="nf4", values=tuple(values.tolist()))


Integrals = tuple[Tensor, Tensor, Tensor]
"""Mass, first and second moment of a density from `a` to infinity, float64 in the shape of a."""


def _gaussian(a: Tensor) -> Integrals:
    density = torch.exp(-a.square() / 2) / math.sqrt(2 * math.pi)
    mass = torch.special.ndtr(-a)
    return mass, density, mass + a.nan_to_num(posinf=0.0) * density


def _laplacian(a: Tensor) -> Integrals:
    decay = torch.exp(-math.sqrt(2) * a) / 2
    a = a.nan_to_num(posinf=0.0)
    return decay, decay * (a + math.sqrt(1 / 2)), decay * (a.square() + math.sqrt(2) * a + 1)


SOURCES: dict[str, Callable[[Tensor], Integrals]] = {"gaussian": _gaussian, "laplacian": _laplacian}
"""Densities of mean 0 and variance 1 for lloyd_max."""
ITERATIONS = 20_000
"""Most iterations of lloyd_max; 6 bits take 7,000 and 4 bits 600."""


def lloyd_max(source: str, bits: int) -> NumberFormat:
    """Return the 2^bits values of least squared error for a source of variance 1 (Max 1960; Lloyd
    1957, published 1982).

    The scale then stands for the standard deviation, and the largest value is a few of them. There
    is no 0, no NaN. Error: unbounded beyond the largest; on average the published distortions.
    """
    positive, _ = _lloyd(source, 2 ** (bits - 1))
    return NumberFormat(
        name=f"lloyd{bits}-{source}", values=(*(-value for value in positive[::-1]), *positive)
    )


def lloyd_max_distortion(source: str, bits: int) -> float:
    """Return the mean squared error of lloyd_max(source, bits) on that source of variance 1."""
    return _lloyd(source, 2 ** (bits - 1))[1]


@cache
def _lloyd(source: str, levels: int) -> tuple[tuple[float, ...], float]:
    """Return (values above 0, distortion); both densities are log-concave, so it is symmetric."""
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
