import dataclasses

import pytest
from matplotlib.axes import Axes

from lsq.errors import draw_costs
from tests.errors.test_costs import COSTS
from tests.errors.test_costs_table import costs_of


def test_all_that_is_above_zero_is_drawn(tmp_path, monkeypatch):
    drawn, plot = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda axes, *given, **more: drawn.append(given) or plot(axes, *given, **more))
    draw_costs(costs_of([(0.1, 0.2), (-0.1, 0.3), (None, 1.0), (0.3, 0.4)]), tmp_path / "costs.png")
    assert drawn[0][:2] == ([0, 3], [0.1, 0.3])
    assert drawn[1][:2] == ((0.1, 0.3), (0.2, 0.4))
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("costs", [COSTS, dataclasses.replace(COSTS, tensors=())])
def test_nothing_above_zero_is_no_mistake(tmp_path, costs):
    draw_costs(costs, tmp_path / "costs.svg")
    assert (tmp_path / "costs.svg").exists()
