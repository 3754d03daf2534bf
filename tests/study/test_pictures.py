"""A picture is drawn whole, with a point for each format, or not at all."""

import dataclasses
import itertools

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text

from lsq.study import (
    DEFAULT_FORMATS,
    Allocator,
    Budget,
    draw,
    draw_costs,
    draw_front,
    measure_tensors,
)
from tests.study.test_allocation import costs_of as of_weights
from tests.study.test_allocation import of_weights as groups_of
from tests.study.test_costs import COSTS, costs_of
from tests.study.test_errors import ERRORS, NOTHING


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: figures.append(figure))
    return figures


def test_points_and_lines(tmp_path, drawn):
    draw(ERRORS, tmp_path / "picture.png", "of a test")
    weights, gradients = drawn[0].axes
    points, *lines = weights.lines
    assert points.get_xydata().tolist() == [[4.5, 19.0], [8.5, 42.0]]
    names = {name.get_text(): name.xy for name in weights.texts}
    assert names == {"int4/row": (4.5, 19.0), "int8/row": (8.5, 42.0)}
    labels = [line.get_label() for line in lines]
    assert "Gaussian: limit" in labels and "Laplacian: Lloyd-Max" in labels
    assert lines[0].get_xydata()[0].tolist() == pytest.approx([1, 6.02], abs=0.01)
    assert (weights.get_title(), gradients.get_title()) == ("weights (3)", "gradients (1)")


def test_names_do_not_lie_on_each_other(tmp_path, monkeypatch):
    """However near the points are; all are shown, also of more formats than there are colours."""
    drawn, save = [], Figure.savefig

    def savefig(figure, *to, **how):
        drawn.append(figure)
        save(figure, *to, **how)

    monkeypatch.setattr(Figure, "savefig", savefig)
    torch.manual_seed(1)
    errors = measure_tensors({"weight": torch.randn(32, 64)})
    draw(errors, tmp_path / "picture.png")
    (axes,) = drawn[0].axes
    assert sorted(name.get_text() for name in axes.texts) == sorted(DEFAULT_FORMATS)
    boxes = [Text.get_window_extent(name) for name in axes.texts]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    frame = axes.get_window_extent()
    assert all(frame.x0 < box.x0 and box.x1 < frame.x1 for box in boxes)


def test_a_front_with_an_allocation(tmp_path, drawn):
    allocator = Allocator(costs=of_weights(), groups=groups_of(("a", "b"), ("c",), ("d",)))
    found = allocator.run(Budget(bits=3.0))
    draw_front(allocator, found, tmp_path / "picture.png")
    above, below = drawn[0].axes
    exact, greedy, uniform, chosen = above.lines
    for line, points in (
        (exact, allocator.front()),
        (greedy, dataclasses.replace(allocator, method="greedy").front()),
        (uniform, allocator.uniform().values()),
    ):
        assert line.get_xydata().tolist() == [[one.bits, one.cost] for one in points]
    assert chosen.get_xydata().tolist() == [[found.bits, found.cost]]
    assert [bar.get_height() for bar in below.patches] == [one.bits for one in found.chosen]
    assert [name.get_text() for name in below.get_xticklabels()] == ["a, b", "c", "d"]
    assert {exact.get_drawstyle(), greedy.get_drawstyle()} == {"steps-post"}


def test_activations_have_another_color(tmp_path, drawn):
    costs = of_weights("ab")
    inputs = [dataclasses.replace(one, kind="activation") for one in costs.tensors]
    costs = dataclasses.replace(costs, tensors=(*costs.tensors, *inputs))
    allocator = Allocator(costs=costs, activations=True)
    draw_front(allocator, allocator.run(Budget(bits=3.0)), tmp_path / "picture.png")
    below = drawn[0].axes[1]
    first, second, third, fourth = (bar.get_facecolor() for bar in below.patches)
    assert first == third != second == fourth
    assert [one.get_text() for one in below.get_legend().get_texts()] == ["weights", "activations"]


def test_pictures_of_nothing_and_of_other_formats(tmp_path):
    with pytest.raises(ValueError, match="a picture is a .png, .svg or .pdf; picture.gif is none"):
        draw(ERRORS, tmp_path / "picture.gif")
    with pytest.raises(ValueError, match="nothing was measured"):
        draw(NOTHING, tmp_path / "picture.png")
    assert not list(tmp_path.iterdir())
    draw(ERRORS, tmp_path / "picture.svg")
    for tensors in (COSTS.tensors, ()):
        draw_costs(dataclasses.replace(COSTS, tensors=tensors), tmp_path / "costs.svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["costs.svg", "picture.svg"]
    assert b"<svg" in (tmp_path / "picture.svg").read_bytes()


def test_every_cost_is_drawn(tmp_path, drawn):
    pairs = [(0.1, 0.2), (-0.1, 0.3), (None, 1.0), (1e-9, 0.0), (0.0, 0.4)]
    draw_costs(costs_of(pairs), tmp_path / "costs.png")
    (weights,) = drawn[0].axes
    assert weights.lines[0].get_xydata().tolist() == [[0, 0.1], [1, -0.1], [3, 1e-9], [4, 0]]
    assert weights.get_title() == "weights (1 not finite, and not shown)"
    assert weights.get_yscale() == "symlog"
    for x, y in weights.lines[0].get_xydata():  # inside the frame
        (left, right), (low, high) = weights.get_xlim(), weights.get_ylim()
        assert left < x < right and low < y < high


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
