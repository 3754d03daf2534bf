"""The sides of bench_step train the same model: from the same weights they come to the same
losses."""

import dataclasses

import bench_step
import pytest
import transformer

SHAPE = dataclasses.replace(transformer.QUICK, dropout=0.0)
FLOAT = "plain float32"


def losses(side: transformer.Side, padded: bool) -> list[float]:
    """Losses before the first, second and third update on one batch."""
    sample = transformer.batch(SHAPE, padded=padded, seed=1)
    found = []
    for _ in range(3):
        loss = side.loss(sample)
        found.append(loss.item())
        side.backward(sample, loss)
        side.update()
    return found


def test_losses_without_padding_agree():
    theirs, ours = (
        transformer.Side(SHAPE, arguments=transformer.FAIRSEQ),
        transformer.PlainSide(SHAPE, autocast=False),
    )
    assert losses(ours, padded=False) == pytest.approx(losses(theirs, padded=False), rel=1e-4)


@pytest.mark.thorough
def test_losses_of_all_sides_agree():
    """In float32 exactly; in bfloat16 and torchao's int8 nearly; lsq's own layers draw other first
    weights."""
    sides, missing = bench_step.build(SHAPE, None, quick=True)
    assert {"pytorch bfloat16 eager", "pytorch bfloat16 compiled"} <= sides.keys()
    assert all(name.startswith("torchao") for name in missing)
    sides[FLOAT] = transformer.PlainSide(SHAPE, autocast=False)
    expected = losses(sides.pop(bench_step.BASELINE), padded=True)
    assert expected[2] < 0.99 * expected[0]
    for name, side in sides.items():
        relative = 1e-4 if name == FLOAT else 0.05 if name.startswith(bench_step.LSQ_NAME) else 0.01
        assert losses(side, padded=True) == pytest.approx(expected, rel=relative), name


def test_without_a_compiler_the_compiled_side_is_missing(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ImportError, match="needs a C.. compiler, and there is no no-such-compiler"):
        transformer.PlainSide(SHAPE, backend="inductor")
