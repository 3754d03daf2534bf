import json
import sys

import limits
import pytest
import step_picture

PARTS = dict.fromkeys((*limits.PARTS, limits.UPDATE, limits.REST), 0.1)


def figures(**parts) -> dict:
    rows = [
        {"side": side, "seconds": value}
        for side, value in (("fairseq float32", 4.0), ("pytorch bfloat16", 1.5))
    ]
    return {"rows": rows, "parts": parts, "limits": {"seconds": PARTS}}


def test_it_draws_what_was_measured(tmp_path, monkeypatch):
    source, picture = tmp_path / "step.json", tmp_path / "step.png"
    source.write_text(json.dumps(figures(**{step_picture.SIDE: PARTS})))
    monkeypatch.setattr(sys, "argv", ["step_picture.py", str(source), str(picture)])
    step_picture.main()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_side_that_was_not_measured_is_named(tmp_path):
    with pytest.raises(ValueError, match="needs the side 'lsq int8, backward int8'"):
        step_picture.draw(**figures(), output=tmp_path / "step.png")
    assert not list(tmp_path.iterdir())
