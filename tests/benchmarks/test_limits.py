"""What a step has to do, counted by hand, and what is drawn of it."""

import shutil

import bench_step
import limits
import operations
import pytest
import transformer

from lsq.native import tiles

SHAPE = transformer.QUICK
TOKENS, PAIRS = SHAPE.sentences * SHAPE.length, SHAPE.sentences * SHAPE.length**2


def test_all_products_of_a_step_count():
    """Each twice more in the backward pass, an addition with every multiplication."""
    hidden, inner = SHAPE.hidden, SHAPE.feed_forward
    weights = SHAPE.layers * (2 * (4 * hidden**2 + 2 * hidden * inner) + 4 * hidden**2)
    work = limits.work_of_step(SHAPE, parameters=100)
    vocabulary = SHAPE.vocabulary * hidden
    found = {part: sum(arithmetic for arithmetic, _ in each) for part, each in work.items()}
    assert found["products"] == 2 * TOKENS * (3 * weights + 2 * vocabulary)
    assert found["loss"] >= 2 * TOKENS * vocabulary
    assert found["attention"] == 2 * PAIRS * hidden * 3 * SHAPE.layers * (2 + 5)
    assert found["norms"] == found["update"] == found["rest"] == 0
    assert work["update"] == [(0, 2900)]
    assert all(moved for part in work.values() for _, moved in part)


def test_the_slower_of_processor_and_memory_counts():
    work = {"products": [(30.0, 1.0), (10.0, 40.0)], "update": []}
    assert limits.allowed(work, rate=10.0, bandwidth=20.0) == {"products": 5.0, "update": 0}


def test_parts_add_up_to_the_step():
    seconds = {"Project": 1.0, "ProjectInputGradient": 2.0, "AttentionGradient": 0.5, "Embed": 0.25}
    found = limits.parts(seconds, update=0.125, step=5.0)
    assert found == {"products": 3.0, "attention": 0.5, "norms": 0.0, "loss": 0.0} | {
        "update": 0.125,
        "rest": 1.375,
    }
    assert {name for names in limits.PARTS.values() for name in names} <= operations.names()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("name", [name for name in tiles.usable() if name != tiles.PLAIN])
def test_the_peak_is_that_of_vectors(name, monkeypatch):
    """Nobody multiplies a thousand million times a second with less; the loop must not have been
    optimised away."""
    monkeypatch.setattr(limits, "PEAK_LOOPS", 2000)
    monkeypatch.setattr(limits, "ROUNDS", 3)
    assert 1e9 < limits.peak(name) < 1e15


def test_a_picture_of_what_was_measured(tmp_path):
    parts = dict.fromkeys((*limits.PARTS, limits.UPDATE, limits.REST), 0.1)
    sides = {"fairseq float32": 4.0, "pytorch bfloat16": 1.5}
    rows = [{"side": side, "seconds": value} for side, value in sides.items()]
    given = {"rows": rows, "limits": {"seconds": parts}, "output": tmp_path / "step.png"}
    with pytest.raises(ValueError, match="needs the side 'lsq int8, backward int8'"):
        bench_step.draw(**given, parts={})
    assert not list(tmp_path.iterdir())
    bench_step.draw(**given, parts={bench_step.SIDE: parts})
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
