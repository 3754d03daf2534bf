"""Bit tensors: matrices of codes of 1 to 8 bits, and their exact products.

`to_bits` makes a `BitTensor`; `a @ b` gives int32 sums, `a.product(b, ...)` another BitTensor, and
`planned(a, b)` says how a product is made.
"""

from lsq.bits.bit_tensor import BitTensor, to_bits
from lsq.bits.choice import Plan, planned

__all__ = ["BitTensor", "Plan", "planned", "to_bits"]
