"""Guard mode fires when a plan, or a kernel, does what it must not."""

from dataclasses import replace

import pytest
import torch

from lsq.layers.memory import plan_memory
from lsq.run import guard
from lsq.run.guard import MARGIN, MemoryGuardError
from tests.layers.toy import Translator, batch, largest


@pytest.fixture
def guarded():
    torch.manual_seed(1)
    model = Translator(backward="int8")
    memory = plan_memory(model, largest(model), mode="guard")
    memory.step = replace(
        memory.step, buffers=dict(memory.step.buffers), offsets=dict(memory.step.offsets)
    )
    return model, memory


def step(model):
    model(*batch(3, 7, 9)).backward()


def shortenable(memory):
    """Keys of buffers that are read after the operation that writes them, and are not borrowed."""
    borrowed = memory.step.borrowed
    return [
        key
        for key, buffer in memory.step.buffers.items()
        if buffer.last > buffer.first and key not in borrowed
    ]


def test_a_sound_plan_is_silent_and_what_was_borrowed_ends_as_poison(guarded):
    model, memory = guarded
    # the first time gradients come to lie there, the second time they are added to others
    for _ in range(2):
        step(model)
        last = len(memory.step.passes) - 1
        assert memory.fired == 0 and all(one.until == last for one in memory.alive.values())
    memory.next_step()
    assert memory.fired == 0 and not memory.alive
    borrowed = memory.step.borrowed.items()
    key, leaf = next((key, one.leaf) for key, one in borrowed if one.leaf is not None)
    poisoned = memory.arena.tensor(memory.step.offsets[key], leaf.shape, torch.float32)
    assert poisoned.isnan().all()


def test_a_write_behind_what_was_borrowed(guarded):
    model, memory = guarded
    step(model)
    step(model)
    key = next(iter(memory.alive))
    memory.red_zone(memory.alive[key])[7] = 0
    message = "something wrote behind the end of .*; found out after it was borrowed"
    with pytest.raises(MemoryGuardError, match=message):
        step(model)


def test_a_pass_that_is_left_out_is_no_fault():
    """Of two losses only one goes back, while the other is kept."""
    torch.manual_seed(1)
    model, other = Translator(backward="int8"), Translator(backward="int8")
    both = torch.nn.ModuleList([model, other])
    memory = plan_memory(both, lambda: largest(model)() + largest(other)(), mode="guard")
    loss, kept = model(*batch(3, 7, 9)), other(*batch(3, 7, 9))
    loss.backward()
    assert memory.fired == 0 and kept.isfinite()


@pytest.mark.parametrize("which", [0, 7, 100, -40, -1])
def test_a_life_that_is_one_operation_too_short(guarded, which):
    model, memory = guarded
    key = shortenable(memory)[which]
    buffer = memory.step.buffers[key]
    memory.step.buffers[key] = replace(buffer, last=buffer.last - 1)
    with pytest.raises(
        MemoryGuardError, match=f"reads {buffer.name.rpartition('/')[2]} after its planned end"
    ):
        step(model)
    assert memory.fired == 1


def test_two_tensors_in_one_place(guarded):
    model, memory = guarded
    first, second = next(
        (a, b)
        for a, one in memory.step.buffers.items()
        for b, other in memory.step.buffers.items()
        if a < b
        and one.first < other.first < one.last
        and one.size > MARGIN < other.size
        and memory.step.borrowed.keys().isdisjoint((a, b))
    )
    memory.step.offsets[second] = memory.step.offsets[first]
    with pytest.raises(MemoryGuardError, match="writes .* over .*, which is still needed"):
        step(model)


def test_a_write_behind_the_end(guarded, monkeypatch):
    model, memory = guarded
    original = guard.GuardedFrame.done

    def spill(frame, program, index):
        if program.operations[index].name == "Attention":
            key = (frame.node, index, 0)
            frame.memory.red_zone(frame.memory.alive[key])[MARGIN - 1] = 0
        original(frame, program, index)

    monkeypatch.setattr(guard.GuardedFrame, "done", spill)
    with pytest.raises(MemoryGuardError, match="wrote behind the end of .*codes"):
        step(model)


def test_dead_tensors_are_poisoned(guarded):
    model, memory = guarded
    step(model)
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.int32, torch.bool):
        tensor = torch.zeros(5, dtype=dtype)
        guard.poison(tensor)
        floats = dtype.is_floating_point
        assert tensor.isnan().all() if floats else (tensor.view(torch.uint8) == 0x80).all()
    key = shortenable(memory)[-1]
    dead = memory.arena.tensor(memory.step.offsets[key], (4,), torch.float32)
    assert dead.isnan().all() or (dead.view(torch.uint8) == 0x80).all()
