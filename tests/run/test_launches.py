"""Launches of operations: every operand is read through the struct, whichever tensor it was at
first."""

import dataclasses

import pytest
import torch

from lsq.native.launch import launch
from lsq.ops import vocabulary_loss_cuda
from lsq.ops.rounding import Add
from lsq.run.cuda import CUDA, part_of
from lsq.run.frames import Slot
from tests.ops import cuda
from tests.run.chains import WORDS, chain


@pytest.fixture
def where() -> CUDA:
    """The backend on the device of the test."""
    return CUDA(cuda.current_device())


def slot(operation, name: str) -> Slot:
    """That of the tensor with this dotted name."""
    (leaf,) = (leaf for leaf in operation.leaves() if leaf.name == name)
    return Slot(operation, leaf)


def test_tensors_that_were_the_same_at_first_may_part(where):
    x, y = torch.randn(2, 41, 48).to(where.place)
    add = Add(a=x, b=x, out=torch.empty(41, 48, device=where.place))
    run = where.prepare([(add, ())])
    run()
    assert torch.equal(add.out, x + x)
    slot(add, "b").put(y)
    run()
    assert torch.equal(add.out, x + y)


def test_parts_of_a_tensor_move_with_it(where, monkeypatch):
    # several products, each of a part of the rows
    monkeypatch.setattr(vocabulary_loss_cuda, "CUDA_BLOCK_ROWS", 8)
    _, _, loss = chain(where.place)
    loss.prediction.x.floats, loss.prediction.target = (
        torch.randn(21, 48).to(where.place),
        torch.randint(0, WORDS, (21,)).to(where.place),
    )
    run = where.prepare([(loss, [where.allocate(*wanted) for wanted in where.scratch(loss)])])
    for _ in range(2):
        run()
        torch.testing.assert_close(
            loss.loss.cpu(), loss.bind(torch.Tensor.cpu).reference()["loss"].reshape(1)
        )
        slot(loss, "prediction.x.floats").put(torch.randn(21, 48).to(where.place))


def test_memory_that_is_no_field_is_refused(where, monkeypatch):
    x = torch.randn(41, 48).to(where.place)
    other = torch.zeros(48).to(where.place)
    monkeypatch.setattr(
        Add,
        "cuda",
        lambda self: [launch("elementwise.cu", "lsq_add", self, other, grid=1, FLOAT=0)],
    )
    with pytest.raises(
        ValueError, match="Add: lsq_add .*neither a field of the operation nor its scratch memory"
    ):
        where.prepare([(Add(a=x, b=x, out=torch.empty_like(x)), ())])


def test_another_operation_is_refused(where, monkeypatch):
    x, launches = torch.randn(41, 48).to(where.place), Add.cuda
    monkeypatch.setattr(Add, "cuda", lambda self: launches(dataclasses.replace(self, a=self.b)))
    with pytest.raises(ValueError, match="Add: lsq_add .*another operation than its own"):
        where.prepare([(Add(a=x, b=x, out=torch.empty_like(x)), ())])


def test_what_is_not_held_may_go(where):
    x = torch.randn(41, 48).to(where.place)
    add = Add(a=x, b=x, out=torch.empty_like(x))
    assert not list(part_of(add, (), where.place, hold=False).addresses.held())
    assert [id(tensor) for tensor in part_of(add, (), where.place).addresses.held()] == list(
        map(id, (x, x, add.out))
    )
