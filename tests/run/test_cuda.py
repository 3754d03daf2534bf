"""GPUs and their emulator: one list for many operations, named after them."""

import pytest
import torch

from lsq.native.launch_list import LaunchList
from lsq.run.cuda import CUDA
from tests.ops import cuda
from tests.run.chains import chain


@pytest.fixture
def where() -> CUDA:
    """The backend on the device of the test."""
    return CUDA(cuda.current_device())


def test_all_operations_are_one_list(monkeypatch, where):
    made, replay = [], LaunchList.run
    monkeypatch.setattr(LaunchList, "run", lambda self: (made.append(self), replay(self)))
    embed, norm, _ = chain(where.place)
    where.prepare([(embed, ()), (norm, ()), (embed, ())])()
    assert len(made) == 1 and norm.out.isfinite().all()


def test_what_a_kernel_cannot_take_is_refused_with_its_name(where):
    embed, norm, _ = chain(where.place)
    embed.x = embed.x.t().contiguous().t()
    with pytest.raises(ValueError, match="^Embed.x is torch.float32 with strides"):
        where.prepare([(embed, ())])
    embed, norm, _ = chain(where.place)
    norm.out = torch.empty(3 * 48 + 1, device=where.place)[1:].view(3, 48)
    with pytest.raises(ValueError, match="^ResidualNorm.out: a tensor begins 4 bytes after"):
        where.prepare([(embed, ()), (norm, ())])
