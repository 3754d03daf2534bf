"""Operations that run by themselves on CUDA: launches that are kept, and what is refused."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lsq.native.launch_list import LaunchList
from lsq.ops.gradient_layout import MessageLayout
from lsq.ops.gradient_messages import Messages, UnpackGradients
from lsq.run import cuda
from lsq.run.cuda import CUDA, emulated_device
from tests.ops.compare import allocated, on_reference, rubbish
from tests.ops.gradient_checks import pack

LAYOUT = MessageLayout.for_values(1000, 3)


@pytest.fixture
def backend() -> CUDA:
    """The emulator; it keeps two lists."""
    return CUDA(emulated_device(), kept=2)


@pytest.fixture
def made(backend, monkeypatch) -> list:
    """Grows with each list that is made."""
    lists = []
    monkeypatch.setattr(cuda, "LaunchList", lambda *given: lists.append(1) or LaunchList(*given))
    return lists


def test_launches_are_kept_for_the_same_memory(backend, made):
    packing = allocated(pack(torch.randn(1, 1000), LAYOUT), rubbish)
    for _ in range(3):
        packing.x.normal_()
        backend.run(packing.bind(lambda tensor: tensor))
        wanted = on_reference(packing).messages.data
        assert torch.equal(packing.messages.data, wanted) and len(made) == 1
    messages, back = Messages(layout=LAYOUT, data=packing.messages.data[None]), torch.empty(1000)
    backend.run(UnpackGradients(messages=messages, x=back))
    backend.run(UnpackGradients(messages=messages, x=back, factor=2.0))
    assert len(made) == 3
    backend.run(packing)  # dropped meanwhile
    assert len(made) == 4 and torch.equal(packing.messages.data, wanted)


def test_kept_launches_keep_no_tensor(backend):
    packing = allocated(pack(torch.randn(1, 1000), LAYOUT), rubbish)
    backend.run(packing)
    alive = weakref.ref(packing.x)
    del packing
    assert alive() is None


def test_memory_that_is_not_aligned_is_refused(backend):
    packing = allocated(pack(torch.zeros(1, 1001)[:, 1:].view(-1)[None], LAYOUT), rubbish)
    with pytest.raises(
        ValueError, match="PackGradients.*a tensor begins 4 bytes after a multiple of 16"
    ):
        backend.run(packing)


def test_threads_share_the_launches(backend):
    x = torch.randn(1, 1000)
    wanted = on_reference(pack(x, LAYOUT)).messages.data

    def work(_):
        packing = allocated(pack(x, LAYOUT), rubbish)
        for _ in range(5):
            backend.run(packing)
        return torch.equal(packing.messages.data, wanted)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))
