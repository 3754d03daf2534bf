"""Bit operations and energy of products y [R, P] = x [R, K] W^T, modelled from published numbers.

Nothing here is measured, and no chip is meant: compare mixes of formats by it, not machines. Taken
to be so:

* A multiplication takes energy in proportion to the product of its operands' bits: a 32-bit one
  16 times that of an 8-bit one (3.1 and 0.2 pJ at 45 nm in Horowitz 2014).
* A product is added to a sum of 32 bits; an addition takes energy in proportion to its bits, 32 fJ
  for 16 bits (Dally 2023).
* A word of 32 bits takes 640 pJ from LPDDR memory and 5 pJ from a local memory of 8 kB (Dally 2023;
  the same as in Horowitz 2014). Codes fill words without gaps.
* In a pass each weight is read once from LPDDR, each input once from the local memory, and each
  result is written there once, as many bits as an input.
* Scales, instructions, leakage and all else that a model computes take nothing.

M. Horowitz, "Computing's energy problem", ISSCC 2014; W. Dally, "Trends in deep learning hardware",
2023.
"""

MULTIPLY_INT8 = 0.2e-12
ADD_INT16 = 32e-15
SUM_BITS = 32
LPDDR_WORD, LOCAL_WORD = 640e-12, 5e-12
WORD_BITS = 32


def bit_operations(
    rows: int, outputs: int, inputs: int, weight_bits: float, activation_bits: float = 8
) -> float:
    """Return R x P x K x bits of a weight x bits of an activation."""
    return rows * outputs * inputs * weight_bits * activation_bits


def joules(
    rows: int, outputs: int, inputs: int, weight_bits: float, activation_bits: float = 8
) -> float:
    """Return the modelled energy of a pass of R rows through a weight [P, K]. `weight_bits`: of a
    value, scales included."""
    sums = rows * outputs * inputs
    multiply = MULTIPLY_INT8 * weight_bits * activation_bits / 64
    add = ADD_INT16 * SUM_BITS / 16
    weight_words = outputs * inputs * weight_bits / WORD_BITS
    local_words = rows * (inputs + outputs) * activation_bits / WORD_BITS
    return sums * (multiply + add) + weight_words * LPDDR_WORD + local_words * LOCAL_WORD
