"""Philox against the known answers of Random123 and a plain implementation; shares and repetition
of dropout."""

import pytest
import torch

from lsq.quant import random as philox_random

KNOWN_ANSWERS = [  # (counter, key, words) from Random123's kat_vectors, philox4x32 with 7 rounds
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


def plain_philox(counter, key):
    """Philox4x32-7 on Python's integers."""
    counter, key = list(counter), list(key)
    for _ in range(7):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        low = 0xFFFFFFFF
        counter = [
            second >> 32 ^ counter[1] ^ key[0],
            second & low,
            first >> 32 ^ counter[3] ^ key[1],
            first & low,
        ]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return tuple(counter)


@pytest.mark.parametrize("counter, key, words", KNOWN_ANSWERS)
def test_the_plain_implementation_is_philox(counter, key, words):
    assert plain_philox(counter, key) == words


def test_the_first_known_answer():
    assert tuple(philox_random.philox(0, 0, 4).tolist()) == KNOWN_ANSWERS[0][2]


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 0x299F31D0_A4093822])
@pytest.mark.parametrize("subsequence", [0, 1, 77, 2**31])
def test_words_of_a_subsequence(key, subsequence):
    unsigned = key % 2**64
    expected = [
        word
        for group in range(5)
        for word in plain_philox(
            (group, 0, subsequence, 0), (unsigned & 0xFFFFFFFF, unsigned >> 32)
        )
    ]
    for numel in (1, 3, 4, 18, 20):
        assert philox_random.philox(key, subsequence, numel).tolist() == expected[:numel]


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_share_of_dropped_elements(probability):
    x = torch.ones(200_000)
    dropped = philox_random.dropout(x, probability, torch.tensor([123]), 4)
    kept = dropped != 0
    deviation = (probability * (1 - probability) / x.numel()) ** 0.5
    assert abs(1 - kept.float().mean().item() - probability) < 5 * deviation
    assert torch.equal(dropped[kept], torch.full((int(kept.sum()),), 1 / (1 - probability)))
    assert abs(dropped.mean().item() - 1) < 5 * deviation / (1 - probability)


def test_words_of_any_elements():
    elements = torch.tensor([[5, 0, 2**31 + 3], [2**40, 2**62 + 2, 5]])
    found = philox_random.philox_of(-7, 3, elements)
    for element, word in zip(elements.flatten().tolist(), found.flatten().tolist(), strict=True):
        group = element // 4
        counter = (group & 0xFFFFFFFF, group >> 32, 3, 0)
        assert word == plain_philox(counter, (-7 & 0xFFFFFFFF, -7 >> 32 & 0xFFFFFFFF))[element % 4]
    x = torch.ones(2, 3)
    assert torch.equal(
        philox_random.dropout(x, 0.5, torch.tensor([-7]), 3, elements), 2.0 * (found >= 2**31)
    )


def test_masks_depend_on_key_and_subsequence_alone():
    x = torch.ones(1000)
    masks = {
        (key, subsequence): philox_random.dropout(x, 0.5, torch.tensor([key]), subsequence)
        for key in (1, 2)
        for subsequence in (1, 2)
    }
    first = masks[1, 1]
    assert torch.equal(philox_random.dropout(x, 0.5, torch.tensor([1]), 1), first)
    assert torch.equal(philox_random.dropout(x[:333], 0.5, torch.tensor([1]), 1), first[:333])
    for other in [(1, 2), (2, 1), (2, 2)]:
        agreement = (masks[other] == first).float().mean()
        assert 0.42 < agreement < 0.58


def test_the_words_of_rows():
    drawn = philox_random.uniform_rows(torch.tensor([-7]), 3, 6, 70)
    first = philox_random.philox(-7, 3, 6).tolist()
    expected = [
        [((word + n * 0x9E3779B9) % 2**32 >> 8) / 2**24 for n in range(70)] for word in first
    ]
    assert drawn.dtype == torch.float32 and drawn.tolist() == expected


def test_no_dropout_returns_x():
    x = torch.randn(5)
    assert philox_random.dropout(x, 0.0, torch.tensor([1]), 1) is x


def test_float64_keeps_its_dtype():
    assert (
        philox_random.dropout(torch.ones(5, dtype=torch.float64), 0.5, torch.tensor([1]), 1).dtype
        == torch.float64
    )


def test_keys_come_from_torchs_generator():
    torch.manual_seed(4)
    first = philox_random.draw_key()
    assert first.dtype == torch.int64 and first.shape == (1,)
    assert philox_random.draw_key() != first
    torch.manual_seed(4)
    assert philox_random.draw_key() == first
    assert philox_random.draw_key(torch.device("meta")).is_meta, (
        "a key may be drawn where it is read"
    )
