import dataclasses

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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


def test_a_picture_that_cannot_be_drawn_leaves_the_one_before(tmp_path, monkeypatch):
    def fail(figure, file, **_):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    path = tmp_path / "costs.png"
    path.write_bytes(b"before")
    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="costs.png"):
        draw_costs(COSTS, path)
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    with pytest.raises(ValueError, match="xyz"):
        draw_costs(COSTS, tmp_path / "costs.xyz")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("costs", [COSTS, dataclasses.replace(COSTS, tensors=())])
def test_nothing_above_zero_is_no_mistake(tmp_path, costs):
    draw_costs(costs, tmp_path / "costs.svg")
    assert (tmp_path / "costs.svg").exists()
