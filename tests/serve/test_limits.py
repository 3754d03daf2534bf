from dataclasses import fields

import pytest

from lsq.serve.limits import Limits


@pytest.mark.parametrize("name", [field.name for field in fields(Limits)])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_limits_are_above_zero(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        Limits(**{name: value})
