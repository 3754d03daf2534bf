import torch

from lsq.dist.codec import Codec
from tests.ops.compare import on_reference
from tests.ops.gradient_checks import pack


def codec(**options) -> Codec:
    return Codec(
        **{
            "block": 64,
            "first_bits": 8,
            "stochastic": False,
            "device": torch.device("cpu"),
            **options,
        }
    )


def test_values_fewer_than_the_layout_holds():
    """A piece of a bucket may be shorter than the pieces of other workers, down to nothing."""
    for values in (0, 1, 70, 96):
        x, full = torch.randn(2, values), torch.zeros(96)
        full[:values] = x.sum(0)
        layout = codec().first_layout(96, 3)
        messages = torch.empty(3, layout.message_bytes, dtype=torch.uint8)
        codec().pack(x, layout, messages)
        assert torch.equal(messages, on_reference(pack(full[None], layout)).messages.data)
        out = torch.full((values,), torch.nan)
        codec().unpack(messages, layout, out)
        assert torch.allclose(out, full[:values], atol=0.05)


def test_the_second_hop_has_eight_bits():
    of_four = codec(first_bits=4)
    first = of_four.first_layout(1000, 4)
    assert (first.bits, of_four.second_layout(first).bits) == (4, 8)


def test_random_rounding_differs_between_calls_and_seeds():
    x, layout = torch.randn(1, 500), codec().first_layout(500, 2)

    def packed(coder: Codec) -> torch.Tensor:
        messages = torch.empty(2, layout.message_bytes, dtype=torch.uint8)
        coder.pack(x, layout, messages)
        return messages

    one, same, other = (codec(stochastic=True, seed=seed) for seed in (1, 1, 2))
    first = packed(one)
    assert torch.equal(first, packed(same))
    assert not torch.equal(first, packed(one)) and not torch.equal(first, packed(other))
