"""FinishSums on CUDA, in the emulator or on a GPU."""

from lsq.ops.sums import FinishSums
from tests.ops.compare import empty
from tests.ops.cuda import compare_cuda, run
from tests.ops.test_input_gradient import case
from tests.ops.test_sums import parts


def test_many_kinds_at_once():
    """Fewer and more rows and columns than a block takes, one sum to three, with a clip and
    without."""
    given = [
        parts(1, 16, 1),
        parts(256, 104, 3),
        parts(7, 40, 2, clip=False),
        parts(600, 0, 0, factor=0.5),
    ]
    given += [parts(300, 24, 1, clip_parts=7)]
    compare_cuda(FinishSums(sums=given))


def test_an_operation_leaves_what_it_would_have_finished():
    operation, _ = case(341)
    expected = run(operation)
    (left,) = operation.leave_sums(lambda name, shape, dtype: empty(*shape))
    found = run(operation)
    assert found.sum is None and found.dclip is None
    left.parts = found.parts
    finished = run(FinishSums(sums=[left])).sums[0]
    assert finished.first.equal(expected.sum) and finished.clip.equal(expected.dclip)
