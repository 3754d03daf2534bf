"""Training signals: how often they are collected, and what is unhealthy."""

from dataclasses import replace

import pytest

from lsq.layers import TensorStatistics
from lsq.layers.signals import complaint, interval_of

HEALTHY = TensorStatistics(
    kind="activation", clip=2.0, clipped_share=0.01, zero_share=0.1, largest_code=127, bits=8
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"clipped_share": 0.05}, None),
        ({"clipped_share": 0.0501}, "5.0% of its values are clipped .clip 2"),
        ({"clipped_share": 0.3, "bits": 4}, "30.0% of its values are clipped"),
        (
            {"clipped_share": 0.3, "bits": None, "largest_code": None},
            "30.0% of its values are clipped",
        ),
        ({"largest_code": 8}, None),
        ({"largest_code": 7}, "largest code is 7 of 127, fewer than 4 bits"),
        ({"largest_code": 7, "bits": 4}, None),
        ({"largest_code": None, "bits": None}, None),
    ],
)
def test_complaint(changes, said):
    text = complaint(replace(HEALTHY, **changes))
    assert text is None if said is None else said.replace(".clip", "(clip") in text


def test_a_complaint_says_what_to_try():
    small, large = (
        replace(HEALTHY, clipped_share=0.5),
        replace(HEALTHY, largest_code=3, kind="weight"),
    )
    assert "try QuantConfig(clip_init='absmax') or" in complaint(small)
    assert complaint(large, "--{}-init {}").endswith("try --weight-init mse")


@pytest.mark.parametrize(
    ("log_interval", "interval"), [(0, 25), (1, 25), (10, 30), (25, 25), (100, 100)]
)
def test_seldom_enough_to_cost_little(log_interval, interval):
    assert interval_of(log_interval) == interval
