"""The memory of a step: planned offsets for any batch up to the planned one, and the order of
passes."""

import pickle

import pytest
import torch

from lsq.layers import TransformerEncoderLayer, programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.memory import plan_memory
from lsq.run.executor import Execution
from tests.layers.examples import mode_on
from tests.layers.shapes import config_of
from tests.run.borrowing import inside


@pytest.fixture
def planned():
    """(layer, memory) for batches up to 5 x 2."""
    torch.manual_seed(0)
    layer = TransformerEncoderLayer(config_of(backward="int8"))
    return layer, plan_memory(layer, lambda: layer(torch.ones(5, 2, 48)).sum())


def program_of(layer, batch, time):
    sizes = PackedSequences(rows=batch * time, count=batch)
    return programs.encoder_layer(layer.config, sizes, mode_on("cpu"))


@pytest.mark.parametrize("batch, time", [(2, 5), (1, 3), (2, 1)])
def test_tensors_of_any_batch_lie_at_the_planned_offsets(planned, batch, time):
    layer, memory = planned
    program = program_of(layer, batch, time)
    frame = memory.open(layer, program)
    base = memory.arena.tensor(0, (1,), torch.uint8).data_ptr()
    for index in range(len(program.operations)):
        tensors = frame.tensors_for(program, index)
        for number, (virtual, tensor) in enumerate(
            zip(program.written(index), tensors, strict=True)
        ):
            if virtual.is_temporary and virtual.size:
                assert tensor.data_ptr() == base + memory.step.offsets[0, index, number]
                assert tuple(tensor.shape) == virtual.shape and tensor.is_contiguous()
            elif virtual.size:
                assert not inside(memory, tensor)


def test_results_lie_outside_and_first_gradients_of_parameters_inside(planned):
    layer, memory = planned
    x = torch.randn(5, 2, 48, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    # rows of x are a view, which is no leaf
    assert not inside(memory, y) and not inside(memory, x.grad)
    assert all(inside(memory, parameter.grad) for parameter in layer.parameters())
    assert pickle.loads(pickle.dumps(memory)) is None


def test_a_forward_pass_out_of_turn_begins_the_next_step(planned):
    layer, memory = planned
    frames = [memory.open(layer, program_of(layer, 2, 5)) for _ in range(2)]
    for frame in frames:
        frame.enter(backward=False)
        frame.leave()
    with pytest.raises(RuntimeError, match="begun another step"):
        frames[0].enter(backward=True)
    frames[1].enter(backward=True)
    frames[1].leave()
    with pytest.raises(RuntimeError, match="has begun before"):
        frames[1].enter(backward=True)


def test_a_pass_that_fails_lets_others_run(planned, monkeypatch):
    layer, _ = planned
    x = torch.randn(5, 2, 48)

    def fail(*_):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(Execution, "run_pass", fail)
        with pytest.raises(ZeroDivisionError):
            layer(x)
    layer(x).sum().backward()
