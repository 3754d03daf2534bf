"""Counter-based random numbers: Philox4x32-7 (Salmon et al. 2011, "Parallel Random Numbers: As Easy
as 1, 2, 3").

Its authors found no flaw in BigCrush from 7 rounds on, and take 10 for safety. Seven rounds compute
30 % less than ten wherever numbers are dropped or rounded at random.

Key: 64 bits of PyTorch's default CPU generator for each run of a layer in training mode, so that
`torch.manual_seed` governs them. Evaluation draws no key: gradients are rounded under a key made of
the layer's input. Counter: (element // 4 as 64 bits, subsequence, 0); lane: element % 4. So every
device and order of execution draws the same mask, and the backward pass draws it again.

Random rounding of the rows of gradients [M, N] draws one word for each row. The columns follow a
Weyl sequence: the word of element (m, n) is (word m of the subsequence + n * 0x9E3779B9) mod 2^32,
a Cranley-Patterson rotation. The word of every element is uniform, so that its rounding has no
bias. Words of different rows are independent. Along a row, words are spread as evenly as can be,
since the step is 2^32 over the golden ratio.
"""

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_GOLDEN = 0x9E3779B9
_WEYL = (_GOLDEN, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 7


def draw_key(device: torch.device | str = "cpu") -> torch.Tensor:
    """Draw a key, int64 [1], from PyTorch's default generator of a device, into its memory."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def key_of(*tensors: torch.Tensor) -> torch.Tensor:
    """Make a key, int64 [1], of about a thousand values of each tensor, without drawing. Equal
    tensors give equal keys."""
    key = torch.zeros(1, dtype=torch.int64, device=tensors[0].device)
    for x in tensors:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        values = x.detach().reshape(-1)[:: max(1, x.numel() // 1024)]
        key += values.view(bits).sum(dtype=torch.int64)
    return key


def philox(key: int, subsequence: int, numel: int) -> torch.Tensor:
    """Return the first `numel` 32-bit words of a subsequence, int64 [numel] in [0, 2^32)."""
    return _groups(key, subsequence, torch.arange(-(-numel // 4))).view(-1)[:numel]


def philox_of(key: int, subsequence: int, element: torch.Tensor) -> torch.Tensor:
    """Return the words of the elements with these numbers, int64 of any shape."""
    return _groups(key, subsequence, element >> 2).gather(-1, (element & 3)[..., None]).squeeze(-1)


def _groups(key: int, subsequence: int, group: torch.Tensor) -> torch.Tensor:
    """Return the four words of each group of four elements, int64 [..., 4]."""
    counter = [
        group & _MASK,
        group >> 32,
        torch.full_like(group, subsequence),
        torch.zeros_like(group),
    ]
    keys = [key & _MASK, (key >> 32) & _MASK]
    for _ in range(_ROUNDS):
        products = [multiplier * counter[2 * i] for i, multiplier in enumerate(_MULTIPLIERS)]
        high = [(product >> 32) & _MASK for product in products]
        low = [product & _MASK for product in products]
        counter = [high[1] ^ counter[1] ^ keys[0], low[1], high[0] ^ counter[3] ^ keys[1], low[0]]
        keys = [(word + step) & _MASK for word, step in zip(keys, _WEYL, strict=True)]
    return torch.stack(counter, dim=-1)


def dropout_threshold(probability: float) -> int:
    """Return the bound below which an element's 32-bit word drops it."""
    return min(round(probability * 2**32), _MASK)


def dropout(
    x: torch.Tensor,
    probability: float,
    key: torch.Tensor,
    subsequence: int,
    element: torch.Tensor | None = None,
) -> torch.Tensor:
    """Zero each element with `probability` and scale the rest by 1 / (1 - probability).

    x has any shape and float dtype. `element`, int64 in the shape of x, numbers the elements; by
    default they are counted from 0 in order.
    """
    if probability == 0.0:
        return x
    if element is None:
        words = philox(int(key), subsequence, x.numel()).view(x.shape)
    else:
        words = philox_of(int(key), subsequence, element)
    kept = words.to(x.device) >= dropout_threshold(probability)
    return torch.where(kept, x * keep_factor(probability), torch.zeros((), dtype=x.dtype))


def keep_factor(probability: float) -> float:
    """Return 1 / (1 - probability), rounded to float32."""
    return float(torch.tensor(1.0 / (1.0 - probability), dtype=torch.float32, device="cpu"))


def uniform_rows(key: torch.Tensor, subsequence: int, rows: int, columns: int) -> torch.Tensor:
    """Return float32 numbers [rows, columns] in [0, 1): a row from one word, by a Weyl sequence."""
    steps = torch.arange(columns) * _GOLDEN
    words = (philox(int(key), subsequence, rows)[:, None] + steps) & _MASK
    return (words >> 8).to(torch.float32) * 2.0**-24
