import random
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from lsq.memory.picture import alive_at_peak, draw
from lsq.memory.planner import plan
from tests.memory.instances import buffers_of, random_buffers


def test_alive_at_peak():
    buffers = buffers_of((4, 0, 3), (9, 3, 5), (7, 4, 6), (0, 3, 9), (5, 5, 5))
    time, alive = alive_at_peak(buffers)
    assert time == 5 and [buffer.name for buffer in alive] == ["b", "c", "e"]
    assert sum(buffer.size for buffer in alive) == 21
    assert alive_at_peak([]) == (None, [])


def test_draw(tmp_path):
    buffers = random_buffers(random.Random(1), 100)
    for name, start in (("map.png", b"\x89PNG"), ("map.svg", b"<?xml")):
        draw(buffers, plan(buffers), tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_the_picture_depends_on_the_plan(tmp_path):
    buffers = buffers_of((4, 0, 3), (6, 3, 5))
    made = plan(buffers)
    draw(buffers, made, tmp_path / "one.png")
    assert made.offsets == {"a": 6, "b": 0}
    draw(buffers, replace(made, offsets={"a": 0, "b": 4}), tmp_path / "other.png")
    assert (tmp_path / "one.png").read_bytes() != (tmp_path / "other.png").read_bytes()


def test_there_must_be_something_to_draw(tmp_path):
    buffers = buffers_of((0, 0, 3))
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(buffers, plan(buffers), tmp_path / "map.png")


def test_the_picture_says_what_it_shows(tmp_path):
    buffers = buffers_of((4, 0, 3), (9, 3, 5))
    draw(buffers, plan(buffers), tmp_path / "map.svg")
    title = "2 buffers over 6 operations, portfolio: 0.000% above the lower bound"
    assert f"<!-- {title} -->" in (tmp_path / "map.svg").read_text()


def test_the_lower_bound_is_seen_under_the_peak(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    buffers = buffers_of((4, 0, 3), (9, 3, 5))
    draw(buffers, plan(buffers), tmp_path / "map.png")
    bound, peak = drawn[0].axes[0].lines
    assert (bound.get_label(), peak.get_label()) == ("lower bound", "peak of the plan")
    assert (
        bound.get_ydata() == peak.get_ydata() and bound.get_linewidth() > 3 * peak.get_linewidth()
    )
