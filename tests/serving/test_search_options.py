"""SearchOptions: what is refused, and in which words."""

import pytest

from lsq.serving import SearchOptions


@pytest.mark.parametrize(
    "given, words",
    [
        ({"beam": 0}, "beam is 0"),
        ({"beam": 2.0}, "beam is 2.0; it must be of type int"),
        ({"beam": 2, "nbest": 3}, "nbest is 3 and beam 2"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"max_len_a": -1.0}, "max_len_a is -1.0"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be from"),
        ({"sampling": True, "sampling_topk": 0}, "sampling_topk is 0"),
        ({"sampling_topk": 3}, "they need sampling"),
        ({"sampling": True, "sampling_topp": 1.5}, "sampling_topp is 1.5"),
        ({"sampling": True, "sampling_topp": 0.5, "sampling_topk": 2}, "not both"),
        ({"beam": 4, "diverse_beam_groups": 3}, "diverse_beam_groups is 3 and beam 4"),
        ({"sampling": True, "diverse_beam_groups": 5}, "does not go with sampling"),
        ({"sampling": "no"}, "sampling is 'no'; it must be of type bool"),
        ({"nbest": True}, "nbest is True"),
        ({"max_len_a": None}, "max_len_a is None; it must be of type float"),
        ({"unk_penalty": -81}, "unk_penalty is -81; it must be at least -80"),
        (
            {"diverse_beam_strength": 1e308},
            "diverse_beam_strength is 1e.308; it must be from -1000 to 1000",
        ),
    ],
)
def test_what_does_not_fit_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        SearchOptions(**given)
