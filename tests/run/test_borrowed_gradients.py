"""First gradients of a step lie in planned memory, whoever holds them: never overwritten, the same
numbers."""

import copy
import gc
import io
import os
import threading

import pytest
import torch

from lsq.commands.step_memory import traced_peak
from lsq.layers import Packing, TransformerEncoderLayer
from lsq.layers.memory import plan_memory, release_memory
from tests.layers.shapes import config_of
from tests.layers.toy import batch, largest, twins
from tests.run.borrowing import backward, both, equal, gradients, inside
from tests.sampling import in_turn

PACKING = Packing(shape=(2, 4))


@pytest.fixture
def pair(request):
    """(planned, naive, memory): equal translators without gradients."""
    planned, naive = twins(backward="int8", calibration_passes=0)
    return (
        planned,
        naive,
        plan_memory(planned, largest(planned), mode=getattr(request, "param", "planned")),
    )


def test_they_take_no_memory_beside_the_arena(pair):
    planned, naive, memory = pair
    for model in (planned, naive):  # clips are measured
        backward(model)
        model.zero_grad()
    bytes_of_gradients = sum(4 * parameter.numel() for parameter in planned.parameters())
    found, expected = (
        traced_peak(lambda model=model: backward(model)) for model in (planned, naive)
    )
    assert found < bytes_of_gradients / 4 < bytes_of_gradients < expected
    assert all(inside(memory, gradient) for gradient in gradients(planned) if gradient is not None)


@pytest.mark.parametrize(
    "dropped, pair",
    in_turn(["before", "between", "after", "in part", "never"], ["planned", "guard"], 1),
    indirect=["pair"],
)
def test_wherever_gradients_are_dropped(pair, dropped):
    planned, naive, memory = pair

    def train(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        found = []
        for seed in range(4):
            if dropped == "before":
                optimizer.zero_grad()
            loss = model(*batch(3, 7, 9, seed=seed))
            if dropped == "between":
                optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            found += [one.clone() for one in gradients(model)]
            optimizer.step()
            if dropped == "after":
                optimizer.zero_grad()
            if dropped == "in part":
                model.encoder.zero_grad()
        return [*found, *model.parameters()]

    assert equal(*both(planned, naive, train))
    assert not hasattr(memory, "fired") or memory.fired == 0


def test_lists_of_gradients_may_be_kept(pair):
    planned, naive, memory = pair

    def kept(model):
        found = []
        for seed in range(3):
            model.zero_grad()
            found += backward(model, seed)
        return found

    found, expected = both(planned, naive, kept)
    assert equal(found, expected) and [inside(memory, one) for one in found].count(True) == len(
        gradients(planned)
    )
    memory.next_step()
    assert equal(found, expected) and not any(inside(memory, one) for one in found)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "view",
    [
        lambda gradient: gradient[1:],
        torch.Tensor.detach,
        torch.Tensor.numpy,
        torch.Tensor.untyped_storage,
    ],
)
def test_a_view_that_is_kept_is_an_error_until_it_is_gone(pair, view):
    planned, naive, _ = pair
    weight = planned.decoder[1].feed_forward.fc2_weight
    both(planned, naive, backward)
    kept, value = view(weight.grad), weight.grad.clone()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="fc2_weight of decoder.1 lies in planned memory .* clone the views"
        ):
            planned(*batch(3, 7, 9))
        assert torch.equal(weight.grad, value)
    del kept
    gc.collect()
    for model in (planned, naive):
        model.zero_grad()
    assert equal(*both(planned, naive, backward))


def test_an_optimizer_inside_the_backward_pass(pair):
    planned, naive, memory = pair

    def train(model):
        def update(parameter):
            parameter.data.add_(parameter.grad, alpha=-0.01)
            parameter.grad = None

        handles = [one.register_post_accumulate_grad_hook(update) for one in model.parameters()]
        for seed in range(3):
            backward(model, seed)
        for handle in handles:
            handle.remove()
        return model.parameters()

    assert equal(*both(planned, naive, train))
    memory.next_step()


def test_hooks_that_take_gradients_away(pair):
    """From a hook, a gradient that is kept is not known to lsq any more: that is said."""
    planned, _, _ = pair
    weight, kept = planned.encoder[0].feed_forward.fc1_weight, []

    def take(parameter):
        kept.append(parameter.grad)
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(take)
    backward(planned)
    value = kept[0].clone()
    with pytest.raises(
        RuntimeError, match="d_feed_forward.fc1_weight of encoder.0 lies in planned memory"
    ):
        planned(*batch(3, 7, 9))
    assert torch.equal(kept[0], value)


def test_an_exception_on_the_way_back(pair):
    planned, naive, _ = pair

    def interrupted(model):
        def stop(parameter):
            raise KeyboardInterrupt

        handle = model.encoder[1].feed_forward.fc1_weight.register_post_accumulate_grad_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            backward(model)
        handle.remove()
        before = gradients(model)
        backward(model, 1)
        return [*before, *gradients(model)]

    assert equal(*both(planned, naive, interrupted))


@pytest.mark.parametrize(
    "replace",
    [
        release_memory,
        lambda model: plan_memory(model, largest(model)),
        lambda model: plan_memory(model, largest(model), mode="naive"),
    ],
)
def test_memory_that_is_taken_away_or_replaced(pair, replace):
    planned, naive, memory = pair
    found, expected = both(planned, naive, backward)
    assert any(inside(memory, one) for one in found)
    replace(planned)
    assert not any(inside(memory, one) for one in found)
    assert equal(found, expected) and equal(*both(planned, naive, lambda model: backward(model, 1)))


def test_copies_and_files_of_gradients_hold_them_alone(pair):
    planned, naive, memory = pair
    found, expected = both(planned, naive, backward)
    copies, file = copy.deepcopy(found), io.BytesIO()
    torch.save(found, file)
    assert file.tell() < 2 * sum(one.nbytes for one in found) + 1e5
    file.seek(0)
    assert equal(copies, expected) and equal(torch.load(file), expected)
    copied = copy.deepcopy(planned)
    backward(planned, 1)
    assert equal(copies, expected) and not any(inside(memory, one) for one in copies)
    assert all(one is None or not inside(memory, one) for one in gradients(copied))


def test_forked_processes_see_them(pair):
    """An arena is wiped there."""
    planned, naive, memory = pair
    found, expected = both(planned, naive, backward)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, repr(found[-1].tolist()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1 << 16).decode() == repr(expected[-1].tolist())
    assert not any(inside(memory, one) for one in found)
    for end in (reading, writing):
        os.close(end)


def test_backward_in_another_thread(pair):
    planned, naive, _ = pair

    def threaded(model):
        loss = model(*batch(3, 7, 9))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        found = gradients(model)
        model.zero_grad()
        backward(model, 1)
        return [*found, *gradients(model)]

    assert equal(*both(planned, naive, threaded))


def test_parameters_of_a_functional_call(pair):
    planned, naive, _ = pair

    def call(model):
        others = {
            name: torch.nn.Parameter(0.5 * one.detach()) for name, one in model.named_parameters()
        }
        for seed in range(2):
            torch.func.functional_call(model, others, tuple(batch(3, 7, 9, seed=seed))).backward()
        return [*(one.grad for one in others.values()), *gradients(model)]

    assert equal(*both(planned, naive, call))


@pytest.mark.parametrize("mode", ["planned", "guard"])
def test_gradients_of_inputs(mode):
    torch.manual_seed(0)
    planned = TransformerEncoderLayer(config_of(backward="int8", calibration_passes=0))
    naive, x = copy.deepcopy(planned), torch.randn(8, 48)
    memory = plan_memory(
        planned, lambda: planned.rows(x.requires_grad_(), PACKING).sum(), mode=mode
    )

    def step(model):
        found = []
        for _ in range(3):
            given = x.detach().clone().requires_grad_()
            model.rows(given, PACKING).square().sum().backward()
            model.rows(given, PACKING).sum().backward()
            model.rows(given * 1, PACKING).sum().backward()  # no leaf here, as was planned
            found.append(given.grad)
        return found

    found, expected = both(planned, naive, step)
    memory.next_step()
    assert equal(found, expected) and not any(inside(memory, one) for one in found)
