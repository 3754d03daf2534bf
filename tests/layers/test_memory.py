"""Planned memory changes no number, and refuses what it was not planned for."""

import copy
import gc
import threading
import weakref

import pytest
import torch

from lsq.layers import TransformerEncoderLayer
from lsq.layers.memory import describe_memory, plan_memory, release_memory
from lsq.memory.planner import overlaps
from lsq.run.executor import Execution
from tests.layers.shapes import config_of
from tests.layers.toy import Translator, batch, largest, losses, twins


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"backward": "float", "pre_norm": True},
        {"backward": "int8", "clip_gradient": "lsq", "twice": True},
        *(
            pytest.param(one, marks=pytest.mark.thorough)
            for one in ({"backward": "int8"}, {"mode": "float"})
        ),
    ],
)
def test_many_updates_give_the_same_losses(options):
    planned, naive = twins(**options)
    memory = plan_memory(planned, largest(planned))
    assert losses(planned, 15) == losses(naive, 15)
    assert all(
        torch.equal(a, b) for a, b in zip(planned.parameters(), naive.parameters(), strict=True)
    )
    assert memory.arena.size == memory.step.plan.peak > 0
    buffers, offsets = list(memory.step.buffers.values()), memory.step.plan.offsets
    assert not list(overlaps(buffers, [offsets[buffer.name] for buffer in buffers]))


@pytest.mark.parametrize(
    "options", [{"backward": "int8"}, {"backward": "float"}, {"mode": "float"}, {"twice": True}]
)
def test_guarded_updates_find_no_fault_and_the_same_losses(options):
    guarded, naive = twins(**options)
    memory = plan_memory(guarded, largest(guarded), mode="guard")
    assert losses(guarded, 3) == losses(naive, 3)
    assert memory.fired == 0


def test_accumulated_gradients():
    planned, naive = twins(backward="int8")
    plan_memory(planned, largest(planned))
    assert losses(planned, 6, accumulate=3) == losses(naive, 6, accumulate=3)


def test_evaluation_between_forward_and_backward_disturbs_nothing():
    planned, naive = twins(backward="int8")
    plan_memory(planned, largest(planned))
    found = []
    for model in (planned, naive):
        torch.manual_seed(2)
        loss = model(*batch(3, 7, 9))
        state = torch.get_rng_state()
        model.eval()
        with torch.no_grad():
            evaluated = model(*batch(7, 21, 5))  # larger than planned: evaluation has no plan
        model.train()
        torch.set_rng_state(state)
        loss.backward()
        found.append([loss, evaluated, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_planning_leaves_no_trace():
    model, other = twins(backward="int8")
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    plan_memory(model, largest(model))
    assert torch.equal(torch.rand(3), expected)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )


def test_a_larger_batch_is_refused_with_both_sizes():
    model = Translator(backward="int8")
    plan_memory(model, largest(model, 4, 16))
    message = (
        r"too large.*embedding needs 13056 bytes for x float32\[68, 48\]; planned were 12288"
        r" bytes.*--max-tokens"
    )
    with pytest.raises(ValueError, match=message):
        model(*batch(4, 17, 16))
    model(*batch(4, 16, 16)).backward()


def test_a_later_step_takes_the_place_of_one_that_did_not_go_back():
    model = Translator(backward="int8")
    plan_memory(model, largest(model))
    loss = model(*batch(3, 7, 9))
    other = model(*batch(3, 7, 9))
    with pytest.raises(
        RuntimeError, match="projection has saved .* is gone: its model has begun another step"
    ):
        loss.backward()
    other.backward()
    model(*batch(3, 7, 9)).backward()


def test_two_runs_in_one_loss_that_were_planned_as_one_are_refused():
    model = Translator(backward="int8")
    plan_memory(model, largest(model))
    with pytest.raises(
        RuntimeError, match="begun another step since.*rehearse the step.*--lsq-memory naive"
    ):
        (model(*batch(3, 7, 9)) + model(*batch(3, 7, 9))).backward()


def test_a_step_that_runs_the_model_twice_can_be_planned():
    """As R-Drop does: two passes, one loss."""
    planned, naive = twins(backward="int8")

    def step(model, *tokens):
        return model(*tokens) + model(*tokens)

    memory = plan_memory(planned, lambda: step(planned, *batch(4, 16, 16)))
    assert any(name.endswith("#2") for name in memory.names)
    for model in (planned, naive):
        torch.manual_seed(3)
        step(model, *batch(3, 7, 9)).backward()
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(planned.parameters(), naive.parameters(), strict=True)
    )


def test_going_back_twice_is_refused():
    model = Translator(backward="int8")
    plan_memory(model, largest(model))
    loss = model(*batch(3, 7, 9))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward pass of projection has begun before"):
        loss.backward()


def test_a_backward_pass_that_was_interrupted_cannot_go_on(monkeypatch):
    layer = TransformerEncoderLayer(config_of(backward="int8"))
    x = torch.randn(5, 2, 48, requires_grad=True)
    plan_memory(layer, lambda: layer(x).sum())
    loss = layer(x).sum()
    original = Execution.run

    def interrupted(execution, indices, *rest):
        original(execution, indices[:-5], *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Execution, "run", interrupted)
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has begun before"):
        loss.backward()
    layer(x).sum().backward()


def test_a_pass_beside_another_is_refused():
    layer = TransformerEncoderLayer(config_of(backward="int8"))
    x = torch.randn(5, 2, 48, requires_grad=True)
    plan_memory(layer, lambda: layer(x).sum())
    found = []

    def other():
        with pytest.raises(
            RuntimeError, match="while another pass in the same planned memory is running"
        ):
            layer(x)
        found.append(True)

    def start(declared, operation):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    start.weights = lambda module, tensors: None
    layer._observer = start
    loss = layer(x).sum()
    layer._observer = None
    assert found
    loss.backward()


def test_eval_mode_has_no_plan():
    model, naive = twins(backward="int8")
    plan_memory(model, largest(model))
    for one in (model, naive):
        torch.manual_seed(3)
        one(*batch(3, 7, 9)).backward()
        one.eval()
        one(*batch(7, 21, 5)).backward()
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(model.parameters(), naive.parameters(), strict=True)
    )


def test_programs_may_be_left_out():
    planned, naive = twins(backward="int8")
    plan_memory(planned, largest(planned))
    for model in (planned, naive):
        torch.manual_seed(3)
        model.encoder, kept = model.encoder[:1], model.encoder
        model(*batch(3, 7, 9)).backward()
        model.encoder = kept
    for a, b in zip(planned.parameters(), naive.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


def test_other_operations_than_planned_are_refused():
    layer = TransformerEncoderLayer(config_of(backward="int8"))
    x = torch.randn(5, 2, 48, requires_grad=True)
    plan_memory(layer, lambda: layer(x).sum())
    layer.config = config_of(backward="float")
    with pytest.raises(RuntimeError, match="other operations than memory was planned for"):
        layer(x)


def test_a_layer_that_came_later_is_refused():
    model = Translator(backward="int8")
    plan_memory(model, largest(model))
    model.encoder[0] = copy.copy(model.encoder[0])
    with pytest.raises(
        RuntimeError, match="encoder_layer is run by a module that was not part of the planned step"
    ):
        model(*batch(3, 7, 9))


def test_two_models_do_not_meet():
    first, second = twins(backward="int8")
    alone, _ = twins(backward="int8")
    plan_memory(first, largest(first))
    plan_memory(second, largest(second))
    torch.manual_seed(4)
    expected = alone(*batch(3, 7, 9))
    expected.backward()
    torch.manual_seed(4)
    loss = first(*batch(3, 7, 9))
    second(*batch(4, 16, 16)).backward()
    loss.backward()
    assert loss == expected
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(first.parameters(), alone.parameters(), strict=True)
    )


def test_memory_is_freed():
    model = Translator(backward="int8")
    memory = weakref.ref(plan_memory(model, largest(model)))
    model(*batch(3, 7, 9)).backward()
    release_memory(model)
    gc.collect()
    assert memory() is None
    model(*batch(5, 20, 20)).backward()


def test_a_copy_of_a_model_has_no_memory():
    model = Translator(backward="int8")
    plan_memory(model, largest(model))
    twin = copy.deepcopy(model)
    assert twin.encoder[0].step_memory is None and model.encoder[0].step_memory is not None


def test_the_same_step_is_planned_once():
    model, other = twins(backward="int8")
    assert plan_memory(model, largest(model)).step is plan_memory(other, largest(other)).step
    assert describe_memory(model, largest(model)) is model.encoder[0].step_memory.step


def test_naive_takes_a_plan_away():
    model = Translator(backward="int8")
    plan_memory(model, largest(model))
    assert plan_memory(model, largest(model), mode="naive") is None
    assert model.encoder[0].step_memory is None


def test_threads_that_do_not_rehearse_compute():
    model, layer = Translator(backward="int8"), TransformerEncoderLayer(config_of())
    found = []

    def step():
        thread = threading.Thread(
            target=lambda: found.append(layer(torch.ones(5, 2, 48)).abs().sum())
        )
        thread.start()
        thread.join()
        return largest(model)()

    plan_memory(model, step)
    assert found[0] > 0


def test_mistakes():
    model = Translator(backward="int8")
    with pytest.raises(ValueError, match="memory is 'red'; allowed: 'planned', 'guard', 'naive'"):
        plan_memory(model, largest(model), mode="red")
    with pytest.raises(ValueError, match="ran no layer of lsq that is trained"):
        plan_memory(model, lambda: torch.nn.Linear(3, 1)(torch.ones(3)))
    with pytest.raises(ValueError, match="returned 'NoneType'; it must return the loss, a scalar"):
        plan_memory(model, lambda: print(largest(model)()))
    with pytest.raises(ValueError, match=r"returned a tensor \(5, 2, 48\)"):
        plan_memory(model, lambda: model.encoder[0](torch.ones(5, 2, 48)))
    with pytest.raises(ValueError, match="also trains .* outside the model"):
        plan_memory(model.encoder, largest(model))


def test_models_without_a_step_to_plan():
    model = Translator(backward="int8").eval()
    with pytest.raises(
        ValueError, match=r"this Translator is in eval mode, .*; call model\.train\(\) first"
    ):
        plan_memory(model, largest(model))
    with pytest.raises(
        ValueError, match=r"no layer of this Linear is lsq's; call lsq\.convert\(model\)"
    ):
        plan_memory(torch.nn.Linear(3, 1), lambda: None)
    model.train().encoder.gradient_checkpointing = True
    with pytest.raises(
        ValueError,
        match="runs layers again in the backward pass, which cannot be planned; call model",
    ):
        plan_memory(model, largest(model))


def test_a_step_that_goes_back_by_itself_leaves_no_gradient():
    model = Translator(backward="int8")

    def step():
        loss = largest(model)()
        loss.backward()
        return loss

    with pytest.raises(ValueError, match="leave backward.. out"):
        plan_memory(model, step)
    assert all(parameter.grad is None for parameter in model.parameters())
