import dataclasses

import pytest
from matplotlib.figure import Figure

from lsq.study import draw_costs
from tests.study.test_costs import COSTS
from tests.study.test_costs_table import costs_of


def test_every_cost_is_drawn(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: drawn.append(figure))
    draw_costs(
        costs_of([(0.1, 0.2), (-0.1, 0.3), (None, 1.0), (1e-9, 0.0), (0.0, 0.4)]),
        tmp_path / "costs.png",
    )
    estimate, weights = sorted(drawn[0].axes, key=lambda axes: axes.get_xlabel(), reverse=True)
    assert weights.lines[0].get_xydata().tolist() == [[0, 0.1], [1, -0.1], [3, 1e-9], [4, 0]]
    assert estimate.lines[0].get_xydata().tolist() == [[0.1, 0.2], [-0.1, 0.3], [1e-9, 0], [0, 0.4]]
    assert weights.get_title() == "weights (1 not finite, and not shown)"
    for axes, scales in ((weights, ["linear", "symlog"]), (estimate, ["symlog", "symlog"])):
        assert [axes.get_xscale(), axes.get_yscale()] == scales
        for x, y in axes.lines[0].get_xydata():  # inside the frame
            assert (
                axes.get_xlim()[0] < x < axes.get_xlim()[1]
                and axes.get_ylim()[0] < y < axes.get_ylim()[1]
            )


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
def test_nothing_to_draw_is_no_mistake(tmp_path, costs):
    draw_costs(costs, tmp_path / "costs.svg")
    assert (tmp_path / "costs.svg").exists()
