"""A picture is drawn whole, with a point for each format, or not at all."""

import pytest
from matplotlib.figure import Figure

from lsq.errors import draw
from lsq.errors.table import Errors
from tests.errors.test_table import ERRORS, entry


def test_points_and_lines(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: drawn.append(figure))
    draw(ERRORS, tmp_path / "picture.png", "of a test")
    weights, gradients = drawn[0].axes
    labels = [line.get_label() for line in weights.lines]
    assert labels[:2] == ["int4/row", "int8/row"] and "Gaussian: limit" in labels and "Laplacian: Lloyd-Max" in labels
    assert weights.lines[0].get_xydata().tolist() == [[4.5, 19.0]]
    assert weights.lines[2].get_xydata()[0].tolist() == pytest.approx([1, 6.02], abs=0.01)
    assert (weights.get_title(), gradients.get_title()) == ("weights (3)", "gradients (1)")


def test_a_file_is_written(tmp_path):
    draw(ERRORS, tmp_path / "picture.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["picture.svg"]
    assert b"<svg" in (tmp_path / "picture.svg").read_bytes()


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a picture is a .png, .svg or .pdf; picture.gif is none"):
        draw(ERRORS, tmp_path / "picture.gif")
    nothing = Errors(clip="kl", percentile=1.0, formats=("nvfp4",), entries=(entry("d", problem="it is odd"),))
    with pytest.raises(ValueError, match="nothing was measured"):
        draw(nothing, tmp_path / "picture.png")
    assert not list(tmp_path.iterdir())
