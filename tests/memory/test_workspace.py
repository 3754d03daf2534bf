"""A workspace: tensors that share planned bytes, in memory that stays or comes and goes."""

import pytest
import torch

from lsq.memory.workspace import Room, Workspace

LIVES = [(1000, 0, 1), (600, 1, 2), (900, 2, 3), (0, 0, 3)]
ROOMS = {"lasting": 1 << 30, "passing": 0}


@pytest.mark.parametrize("room", ROOMS)
def test_tensors_that_are_needed_together_lie_apart_and_others_share_bytes(room):
    workspace = Workspace(Room("cpu", ROOMS[room]), LIVES)
    a, b, c, empty = (
        workspace.tensor(number, (size,), torch.uint8) for number, (size, _, _) in enumerate(LIVES)
    )
    assert workspace.size < 2560 and empty.shape == (0,)
    with workspace.opened():
        a.fill_(1)
        b.fill_(2)
        assert (a == 1).all()
        c.fill_(3)
        assert (b == 2).all() and not (a == 1).all()


def test_workspaces_of_a_lasting_room_begin_at_one_place_and_never_move():
    room = Room("cpu", 1 << 30)
    small, large = Workspace(room, [(400, 0, 0)]), Workspace(room, [(1 << 22, 0, 0), (400, 0, 0)])
    x, y = small.tensor(0, (100,), torch.float32), large.tensor(0, (1 << 20,), torch.float32)
    assert x.data_ptr() == y.data_ptr()
    for _ in range(2):
        for workspace in (small, large):
            with workspace.opened() as moved:
                assert not moved
    y.fill_(3)
    room.release()
    assert not y.any()  # another page
    with small.opened():
        assert x.fill_(2).sum() == 200


def test_tensors_follow_passing_memory_which_is_there_only_meanwhile():
    workspace = Workspace(Room("cpu"), [(1 << 20, 0, 0), (64, 0, 0)])
    x, y = (
        workspace.tensor(0, (512, 512), torch.float32),
        workspace.tensor(1, (8, 2), torch.float32),
    )
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
