"""Planned memory changes no number, and refuses what it was not planned for."""

import copy
import gc
import threading
import weakref

import pytest
import torch

from lsq.layers import TransformerEncoderLayer
from lsq.layers.memory import describe_memory, plan_memory, release_memory
from lsq.memory.buffers import overlaps
from lsq.run.executor import Execution
from tests.layers.shapes import config_of
from tests.layers.toy import Translator, batch, largest, losses, twins

SMALL = 3, 7, 9


def planned(how: str = "planned", step=None, **options):
    """(a translator in planned memory, the same without, the memory)."""
    model, naive = twins(**{"backward": "int8", **options})
    rehearsed = largest(model) if step is None else lambda: step(model)
    return model, naive, plan_memory(model, rehearsed, mode=how)


def planned_layer():
    """(a layer in planned memory, its input)."""
    layer, x = TransformerEncoderLayer(config_of(backward="int8")), torch.randn(5, 2, 48)
    x.requires_grad_()
    plan_memory(layer, lambda: layer(x).sum())
    return layer, x


def alike(run, *models) -> None:
    """Check that run(model) gives all models the same results, and gradients that are the same."""
    found = []
    for model in models:
        torch.manual_seed(3)
        found.append([*(run(model) or ()), *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one is other is None) or torch.equal(one, other)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"backward": "float", "pre_norm": True},
        {"clip_gradient": "lsq", "twice": True},
        {},
        {"mode": "float"},
    ],
)
def test_many_updates_give_the_same_losses(options):
    model, naive, memory = planned(**options)
    assert losses(model, 15) == losses(naive, 15)
    assert all(map(torch.equal, model.parameters(), naive.parameters()))
    assert memory.arena.size == memory.step.plan.peak > 0
    buffers, offsets = list(memory.step.buffers.values()), memory.step.plan.offsets
    assert not list(overlaps(buffers, [offsets[buffer.name] for buffer in buffers]))


@pytest.mark.parametrize("options", [{}, {"backward": "float"}, {"mode": "float"}, {"twice": True}])
def test_guarded_updates_find_no_fault_and_the_same_losses(options):
    model, naive, memory = planned("guard", **options)
    assert losses(model, 3) == losses(naive, 3)
    assert memory.fired == 0


@pytest.mark.thorough
def test_accumulated_gradients():
    model, naive, _ = planned()
    assert losses(model, 6, accumulate=3) == losses(naive, 6, accumulate=3)


def test_evaluation_disturbs_nothing():
    """It has no plan, and may be larger than planned, also between forward and backward pass."""

    def run(model):
        loss = model(*batch(*SMALL))
        state = torch.get_rng_state()
        with torch.no_grad():
            evaluated = model.eval()(*batch(7, 21, 5))
        model.train()
        torch.set_rng_state(state)
        loss.backward()
        model.eval()(*batch(7, 21, 5)).backward()
        return loss, evaluated

    alike(run, *planned()[:2])


def test_planning_leaves_no_trace():
    model, other = twins(backward="int8")
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    plan_memory(model, largest(model))
    assert torch.equal(torch.rand(3), expected)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_a_larger_batch_is_refused_with_both_sizes():
    model, *_ = planned()
    message = (
        r"too large.*embedding needs 13056 bytes for x float32\[68, 48\]; planned were 12288"
        r" bytes.*--max-tokens"
    )
    with pytest.raises(ValueError, match=message):
        model(*batch(4, 17, 16))
    model(*batch(4, 16, 16)).backward()


def test_a_later_step_takes_the_place_of_one_that_did_not_go_back():
    model, *_ = planned()
    loss, other = model(*batch(*SMALL)), model(*batch(*SMALL))
    with pytest.raises(
        RuntimeError, match="projection has saved .* is gone: its model has begun another step"
    ):
        loss.backward()
    other.backward()
    model(*batch(*SMALL)).backward()
    with pytest.raises(
        RuntimeError, match="begun another step since.*rehearse the step.*--lsq-memory naive"
    ):
        (model(*batch(*SMALL)) + model(*batch(*SMALL))).backward()


def test_a_step_that_runs_the_model_twice_can_be_planned():
    """As R-Drop does: two passes, one loss."""

    def step(model, sizes=(4, 16, 16)):
        return model(*batch(*sizes)) + model(*batch(*sizes))

    model, naive, memory = planned(step=step)
    assert any(name.endswith("#2") for name in memory.names)
    alike(lambda model: step(model, SMALL).backward(), model, naive)


def test_going_back_twice_is_refused():
    model, *_ = planned()
    loss = model(*batch(*SMALL))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward pass of projection has begun before"):
        loss.backward()


def test_a_backward_pass_that_was_interrupted_cannot_go_on(monkeypatch):
    layer, x = planned_layer()
    loss, original = layer(x).sum(), Execution.run

    def interrupted(execution, indices, *rest):
        original(execution, indices[:-5], *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Execution, "run", interrupted)
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has begun before"):
        loss.backward()
    layer(x).sum().backward()


def in_a_thread(function) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_pass_beside_another_is_refused():
    (layer, x), found = planned_layer(), []

    def other():
        with pytest.raises(
            RuntimeError, match="while another pass in the same planned memory is running"
        ):
            layer(x)
        found.append(True)

    def start(declared, operation):
        in_a_thread(other)

    start.weights = lambda module, tensors: None
    layer._observer = start
    loss = layer(x).sum()
    layer._observer = None
    assert found
    loss.backward()


def test_programs_may_be_left_out():
    def run(model):
        model.encoder, kept = model.encoder[:1], model.encoder
        model(*batch(*SMALL)).backward()
        model.encoder = kept

    alike(run, *planned()[:2])


def test_other_steps_than_planned_are_refused():
    layer, x = planned_layer()
    layer.config = config_of(backward="float")
    with pytest.raises(RuntimeError, match="other operations than memory was planned for"):
        layer(x)
    model, *_ = planned()
    model.encoder[0] = copy.copy(model.encoder[0])
    with pytest.raises(
        RuntimeError, match="encoder_layer is run by a module that was not part of the planned step"
    ):
        model(*batch(*SMALL))


def test_two_models_do_not_meet():
    (first, alone, memory), (second, _, same) = planned(), planned()
    assert memory.step is same.step  # the same step is planned once
    assert describe_memory(first, largest(first)) is memory.step

    def run(model):
        loss = model(*batch(*SMALL))
        if model is first:
            second(*batch(4, 16, 16)).backward()
        loss.backward()
        return (loss,)

    alike(run, first, alone)


@pytest.mark.thorough
def test_memory_is_freed():
    model, _, memory = planned()
    twin = copy.deepcopy(model)
    assert twin.encoder[0].step_memory is None and model.encoder[0].step_memory is memory
    memory = weakref.ref(memory)
    model(*batch(*SMALL)).backward()
    release_memory(model)
    gc.collect()
    assert memory() is None
    model(*batch(5, 20, 20)).backward()
    plan_memory(model, largest(model))
    assert plan_memory(model, largest(model), mode="naive") is None
    assert model.encoder[0].step_memory is None


def test_threads_that_do_not_rehearse_compute():
    layer, found = TransformerEncoderLayer(config_of()), []

    def step(model):
        in_a_thread(lambda: found.append(layer(torch.ones(5, 2, 48)).abs().sum()))
        return largest(model)()

    planned(step=step)
    assert found[0] > 0


def back_by_itself(model):
    loss = largest(model)()
    loss.backward()
    return loss


def test_mistakes():
    model = Translator(backward="int8")
    step, encoder = largest(model), model.encoder
    other = torch.nn.Linear(3, 1)
    for planned, run, message in (
        (model, lambda: other(torch.ones(3)), "ran no layer of lsq that is trained"),
        (model, lambda: print(step()), "returned 'NoneType'; it must return the loss, a scalar"),
        (model, lambda: encoder[0](torch.ones(5, 2, 48)), r"returned a tensor \(5, 2, 48\)"),
        (encoder, step, "also trains .* outside the model"),
        (model, lambda: back_by_itself(model), "leave backward.. out"),
        (other, lambda: None, r"no layer of this Linear is lsq's; call lsq\.convert\(model\)"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_memory(planned, run)
    with pytest.raises(ValueError, match="memory is 'red'; allowed: 'planned', 'guard', 'naive'"):
        plan_memory(model, step, mode="red")
    with pytest.raises(ValueError, match=r"this Translator is in eval .*; call model\.train\(\)"):
        plan_memory(model.eval(), step)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.train().encoder.gradient_checkpointing = True
    with pytest.raises(ValueError, match="runs layers again in .*, which cannot be planned; call"):
        plan_memory(model, step)
