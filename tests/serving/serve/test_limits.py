from dataclasses import fields

import pytest

from lsq.serving.decode import SearchOptions
from lsq.serving.serve.limits import Limits


@pytest.mark.parametrize("name", [field.name for field in fields(Limits)])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_limits_are_above_zero(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        Limits(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 4, "max_len_b": 100}, None),
        ({"beam": 5, "max_len_b": 100}, "beam is 5; this service takes 4 at most"),
        ({"beam": 4, "max_len_b": 101}, "with this max_len_a of 0, max_len_b may be 100"),
        ({"beam": 4, "max_len_a": 2.0, "max_len_b": 60}, None),
        (
            {"beam": 4, "max_len_a": 2.0, "max_len_b": 61},
            "with this max_len_a of 2, max_len_b may be 60",
        ),
        ({"beam": 4, "max_len_a": 1e308, "max_len_b": 0}, "max_len_b may be 0"),
    ],
)
def test_what_options_may_allow(options, message):
    limits, options = Limits(beam=4, words=100), SearchOptions(**options)
    if message is None:
        limits.check(options, longest_source=20)
        return
    with pytest.raises(ValueError, match=message):
        limits.check(options, longest_source=20)
