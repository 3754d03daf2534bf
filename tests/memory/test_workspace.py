"""A workspace: tensors that stay while their memory comes and goes."""

import pytest
import torch

from lsq.memory.workspace import Workspace

LIVES = [(1000, 0, 1), (600, 1, 2), (900, 2, 3), (0, 0, 3)]


def test_tensors_that_are_needed_together_lie_apart_and_others_share_bytes():
    workspace = Workspace(LIVES)
    a, b, c, empty = (workspace.tensor(number, (size,), torch.uint8) for number, (size, _, _) in enumerate(LIVES))
    assert workspace.size < 2560 and empty.shape == (0,)
    with workspace.opened():
        a.fill_(1)
        b.fill_(2)
        assert (a == 1).all()
        c.fill_(3)
        assert (b == 2).all() and not (a == 1).all()


def test_tensors_follow_their_memory_which_is_there_only_meanwhile():
    workspace = Workspace([(1 << 20, 0, 0), (64, 0, 0)])
    x, y = workspace.tensor(0, (512, 512), torch.float32), workspace.tensor(1, (8, 2), torch.float32)
    with workspace.opened():
        between = y.data_ptr() - x.data_ptr()
    assert x.untyped_storage().nbytes() == 0
    with pytest.raises(ZeroDivisionError), workspace.opened():
        before = x.data_ptr()
        raise ZeroDivisionError
    assert x.untyped_storage().nbytes() == 0
    others = []
    while True:  # until its place is taken
        others.append(torch.empty(1 << 18))
        with workspace.opened() as moved:
            assert moved == (x.data_ptr() != before) and y.data_ptr() - x.data_ptr() == between
            y.fill_(3)
            assert y.shape == (8, 2) and y.sum() == 48
            if moved:
                break
        assert len(others) < 100
