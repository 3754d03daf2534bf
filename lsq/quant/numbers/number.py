"""A number format: what each of its codes is worth, and how floats become codes.

All formats are tables of at most 256 values, so that one rounding serves them all: a float becomes
the code of the nearest value. What its values are in units of is for scaled.py to say.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """Codes and their values.

    Rounding is monotone, idempotent and, where the values are, symmetric about zero. A float
    halfway between two values becomes the one of even rank by magnitude, which for integers and
    floats is the even one. Floats beyond the largest value, infinities among them, become the
    largest. NaN becomes the code whose value is NaN; where there is none it becomes that of zero,
    and the scale has to say it (scaled.py).
    """

    name: str
    values: tuple[float, ...]
    """What each code is worth, from code 0 on; infinities and NaN are what no finite float becomes.
    """

    def __post_init__(self) -> None:
        usable = {value for value in self.values if math.isfinite(value)}
        if not 2 <= len(self.values) <= 256 or len(usable) < 2:
            raise ValueError(
                f"{self.name} has {len(self.values)} codes for {len(usable)} finite values; give it"
                " 2 to 256 codes "
                "for at least 2 values"
            )

    @property
    def bits(self) -> float:
        """Width of a packed code; a fraction where several share a byte."""
        codes, stored = self.word
        return 8 * stored / codes

    @cached_property
    def word(self) -> tuple[int, int]:
        """(codes, bytes) of the smallest whole number of bytes that codes fill: (8, 3) for 8 codes
        of 3 bits.

        Where the number of codes is no power of 2, as many as a byte holds: (5, 1) for 3 codes.
        """
        radix = len(self.values)
        width = (radix - 1).bit_length()
        if radix != 2**width:
            return int(math.log(256, radix)), 1
        shared = math.gcd(width, 8)
        return 8 // shared, width // shared

    @cached_property
    def largest(self) -> float:
        """The largest magnitude of a finite value."""
        return max(abs(value) for value in self.values if math.isfinite(value))

    @cached_property
    def symmetric(self) -> bool:
        """Whether the negative of each value is a value, too."""
        finite = {value for value in self.values if math.isfinite(value)}
        return finite == {-value for value in finite}

    def encode(self, x: Tensor) -> Tensor:
        """Codes uint8, in the shape of float x, which is in units of the scale and is looked at in
        float32."""
        boundaries, codes, missing = (part.to(x.device) for part in boundaries_of(self.values))
        x = x.float().contiguous()
        found = codes[torch.bucketize(x, boundaries, out_int32=True)]
        return torch.where(x.isnan(), missing, found)

    def decode(self, codes: Tensor) -> Tensor:
        """Values float32 of integer codes, in their shape.

        Raises:
            ValueError: a code is none of this format's.
        """
        low, high = map(int, codes.aminmax()) if codes.numel() else (0, 0)
        if low < 0 or high >= len(self.values):
            raise ValueError(
                f"codes of {self.name} are from 0 to {len(self.values) - 1}, not from {low} to"
                f" {high}"
            )
        return torch.tensor(self.values, dtype=torch.float32, device=codes.device)[codes.int()]

    def pack(self, codes: Tensor) -> Tensor:
        """Codes, any shape -> bytes uint8 [whole words]: the first code of a word is its lowest
        digit."""
        count, stored = self.word
        flat = codes.flatten().to(torch.int64)
        digits = torch.nn.functional.pad(flat, (0, -flat.numel() % count)).view(-1, count)
        words = (digits * self._weights(codes.device)).sum(1, keepdim=True)
        return (
            (words >> 8 * torch.arange(stored, device=codes.device) & 255).to(torch.uint8).flatten()
        )

    def unpack(self, packed: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """Inverse of pack: codes uint8 of this shape.

        Raises:
            ValueError: `packed` does not hold exactly the bytes of that many codes.
        """
        count, stored = self.word
        numel = math.prod(shape)
        wanted = -(-numel // count) * stored
        if packed.numel() != wanted:
            raise ValueError(
                f"{numel} codes of {self.name} (shape {list(shape)}) take {wanted} bytes, but"
                " packed holds "
                f"{packed.numel()}"
            )
        words = packed.view(-1, stored).to(torch.int64) << 8 * torch.arange(
            stored, device=packed.device
        )
        digits = words.sum(1, keepdim=True) // self._weights(packed.device) % len(self.values)
        return digits.flatten()[:numel].view(shape).to(torch.uint8)

    def _weights(self, device: torch.device) -> Tensor:
        """What each digit of a word counts."""
        return len(self.values) ** torch.arange(self.word[0], device=device)


@cache
def boundaries_of(values: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """(boundaries float32 [V - 1], codes uint8 [V], code of NaN uint8 []) of V different finite
    values, in order.

    A float above boundary i - 1, and up to boundary i, becomes codes[i]. Boundaries whose own place
    belongs to the value above are moved down by one float.
    """
    code_of: dict[float, int] = {}
    for code, value in enumerate(values):
        if math.isfinite(value):
            code_of.setdefault(value, code)
    ordered = sorted(code_of)
    rank = {magnitude: i for i, magnitude in enumerate(sorted({abs(value) for value in ordered}))}
    # tables are kept, whatever the default device is
    levels = torch.tensor(ordered, dtype=torch.float64, device="cpu")
    middle = ((levels[1:] + levels[:-1]) / 2).float()
    upper = torch.tensor([rank[abs(value)] % 2 == 1 for value in ordered[:-1]], device="cpu")
    below = torch.nextafter(middle, torch.full_like(middle, -math.inf))
    missing = [code for code, value in enumerate(values) if math.isnan(value)]
    zero = code_of[min(ordered, key=abs)]
    codes = torch.tensor([code_of[value] for value in ordered], dtype=torch.uint8, device="cpu")
    of_nan = torch.tensor((missing or [zero])[0], dtype=torch.uint8, device="cpu")
    return torch.where(upper, below, middle), codes, of_nan


def signal_to_noise(x: Tensor, found: Tensor) -> float:
    """10 log10 of the squares of x over those of x - found, in decibels; of the same shape.

    Infinite where nothing differs, NaN where there is neither signal nor noise, or a NaN.
    """
    signal = float(x.double().square().sum())
    noise = float((x.double() - found.double()).square().sum())
    if noise == 0 or signal == 0:
        return math.inf if signal > 0 else math.nan if noise == 0 else -math.inf
    return 10 * math.log10(signal / noise)
