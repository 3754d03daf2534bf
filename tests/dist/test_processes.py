import pytest

from tests.dist.processes import ProcessFailed, run


def raises(rank: int) -> None:
    raise RuntimeError("on purpose")


def test_the_harness_sees_failures():
    with pytest.raises(ProcessFailed, match="on purpose"):
        run(raises, 1)
