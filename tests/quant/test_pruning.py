"""When masks are chosen, and what may be asked for."""

import pytest

from lsq.quant import Pruning
from tests.ops.compare import refused


@pytest.mark.parametrize(
    ("pruning", "due", "sparse"),
    [
        (Pruning(every=3), [0, 3, 6, 9], range(10)),
        (Pruning(every=0), [0], range(10)),
        (Pruning(every=2, begin=3), [3, 5, 7, 9], range(3, 10)),
        (Pruning(every=2, begin=1, end=6), [1, 3, 5], range(1, 6)),
        (Pruning(every=0, begin=4, end=5), [4], range(4, 5)),
    ],
)
def test_schedule(pruning, due, sparse):
    assert [updates for updates in range(10) if pruning.due(updates)] == due
    assert [updates for updates in range(10) if pruning.sparse(updates)] == list(sparse)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "1:4"}, r"pattern is '1:4'; allowed: '2:4'"),
        ({"measure": "output "}, r"measure is 'output '; allowed: 'magnitude', 'output'"),
        ({"every": -1}, r"every is -1; it must be a whole number, 0 or more"),
        ({"begin": 0.5}, r"begin is 0.5; it must be a whole number"),
        ({"decay": float("nan")}, r"decay is nan; it must be a finite number, 0 or more"),
        ({"begin": 5, "end": 5}, r"end is 5; it must be a whole number above begin \(5\), or None"),
    ],
)
def test_refused(options, message):
    with refused(message):
        Pruning(**options)


def test_read():
    assert Pruning.read("") is None
    assert Pruning.read("2:4") == Pruning()
    assert Pruning.read(" 2:4, every = 8,decay=1e-2, begin=3, end=40") == Pruning(
        every=8, decay=0.01, begin=3, end=40
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4:8", r"sparsity is '4:8': pattern is '4:8'; allowed: '2:4'; '' is dense"),
        ("2:4,end=0", r"end is 0; it must be a whole number above begin \(0\)"),
        (
            "2:4,evry=3",
            r"'evry=3' says nothing; behind the pattern may follow, once each: every=...,"
            r" decay=..., ",
        ),
        ("2:4,every=3,every=4", r"'every=4' says nothing"),
        ("2:4,measure=output", r"'measure=output' says nothing"),
        ("2:4,every", r"'every' says nothing"),
        ("2:4,every=1.5", r"every must be a number, not '1.5'"),
        ("every=3", r"pattern is 'every=3'; allowed: '2:4'"),
        (0.5, r"sparsity is 0.5; it must be a text, such as '2:4'"),
    ],
)
def test_what_cannot_be_read(text, message):
    with refused(message):
        Pruning.read(text)
