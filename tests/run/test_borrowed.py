"""Results and gradients that are borrowed from planned memory: the same numbers, and nothing that
is kept is overwritten."""

import copy
import gc
import io
import os
import threading

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lsq.commands.step_memory import traced_peak
from lsq.layers import Packing, TransformerEncoderLayer, VocabularyProjection
from lsq.layers.memory import plan_memory, release_memory
from lsq.run.step import crossing
from tests.dist.processes import run as run_processes
from tests.layers.shapes import config_of
from tests.layers.toy import PADDING, VOCABULARY, batch, largest, twins
from tests.run.borrowing import backward, both, equal, gradients, inside
from tests.sampling import in_turn

PACKING = Packing(shape=(2, 4))
VIEW = "lies in planned memory .* clone the views"


@pytest.fixture
def pair(request):
    """(planned, naive, memory): equal translators without gradients."""
    planned, naive = twins(backward="int8", calibration_passes=0)
    mode = getattr(request, "param", "planned")
    return planned, naive, plan_memory(planned, largest(planned), mode=mode)


@pytest.fixture
def pair_with_gradients(pair):
    """The same, whose parameters have gradients."""
    for model in pair[:2]:
        torch.manual_seed(0)
        model(*batch(3, 7, 9)).backward()
    return pair


def leaves(memory, found, expected) -> None:
    """What is kept has its values once the step is over, outside of the arena."""
    assert equal(found, expected)
    memory.next_step()
    assert equal(found, expected)
    assert not any(inside(memory, one) for one in found if one is not None)


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("options", [{"backward": "int8"}, {"twice": True}, {"mode": "float"}])
@pytest.mark.parametrize("mode", ["planned", "guard"])
def test_gradients_that_stay_or_go(options, to_none, mode):
    planned, naive = twins(**options)
    memory = plan_memory(planned, largest(planned), mode=mode)
    for seed in range(4):
        for model in (planned, naive):
            torch.manual_seed(seed)
            backward(model, seed)
            backward(model, seed + 1)  # as with --update-freq 2
        assert equal(gradients(planned), gradients(naive))
        assert not any(inside(memory, gradient) for gradient in gradients(planned))
        for model in (planned, naive):
            model.zero_grad(set_to_none=to_none)
    assert mode == "planned" or memory.fired == 0


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


def test_gradients_take_no_memory_beside_the_arena(pair):
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


def test_contributions_to_a_shared_table_are_added_in_its_first_place(pair_with_gradients):
    planned, _, memory = pair_with_gradients
    table, tables = planned.embedding.weight, {}
    for one in memory.step.passes:
        for key, border, source in crossing(one):
            if one.backward and border.shape == table.shape:
                tables.setdefault(source, []).append(key)
    ((first, *others),) = tables.values()
    borrows = [memory.step.borrowed[key] for key in (first, *others)]
    assert [one.keep for one in borrows] == [False, True, True]
    assert borrows[0].until == max(one.until for one in borrows)
    before = table.grad.clone()
    backward(planned)
    total = memory.arena.tensor(memory.step.offsets[first], table.shape, table.dtype)
    torch.testing.assert_close(table.grad, before + total)
    assert total.abs().sum() > 0


# What a model may do with its passes and gradients, that must not change any number


def own_projection(model):
    torch.manual_seed(2)
    quant = model.projection.quant
    model.projection = VocabularyProjection(VOCABULARY, 48, quant=quant, padding_idx=PADDING)
    if model.encoder[0].step_memory is not None:
        plan_memory(model, largest(model))
    return [one.clone() for seed in range(3) for one in backward(model, seed)]


def without_loss(model):
    """The table's first gradient is one that was planned to be added to another."""
    for to_none in (False, True):
        model.zero_grad(set_to_none=to_none)
        source, target = batch(3, 7, 9)
        (model.embedding(source).square().sum() + model.embedding(target).sum()).backward()
    return [model.embedding.weight.grad]


def with_fewer_layers(model):
    model.encoder, kept = model.encoder[:1], model.encoder
    found = [one.clone() for one in backward(model)]
    model.encoder = kept
    return [*found, *backward(model)]


def frozen_later(model):
    model.encoder[0].feed_forward.fc1_weight.requires_grad_(False)
    return backward(model)


def stepping_inside(model):
    def update(parameter):
        parameter.data.add_(parameter.grad, alpha=-0.01)
        parameter.grad = None

    handles = [one.register_post_accumulate_grad_hook(update) for one in model.parameters()]
    for seed in range(3):
        backward(model, seed)
    for handle in handles:
        handle.remove()
    return model.parameters()


def interrupted(model):
    def stop(parameter):
        raise KeyboardInterrupt

    weight = model.encoder[1].feed_forward.fc1_weight
    handle = weight.register_post_accumulate_grad_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        backward(model)
    handle.remove()
    before = gradients(model)
    return [*before, *backward(model, 1)]


def in_a_thread(model):
    thread = threading.Thread(target=model(*batch(3, 7, 9)).backward)
    thread.start()
    thread.join()
    found = gradients(model)
    model.zero_grad()
    return [*found, *backward(model, 1)]


def functional_call(model):
    others = {
        name: torch.nn.Parameter(0.5 * one.detach()) for name, one in model.named_parameters()
    }
    for seed in range(2):
        torch.func.functional_call(model, others, tuple(batch(3, 7, 9, seed=seed))).backward()
    return [*(one.grad for one in others.values()), *gradients(model)]


@pytest.mark.parametrize("first", ["pair", "pair_with_gradients"])
@pytest.mark.parametrize(
    "step",
    [
        own_projection,
        without_loss,
        with_fewer_layers,
        frozen_later,
        stepping_inside,
        interrupted,
        in_a_thread,
        functional_call,
    ],
)
def test_numbers_are_those_without_a_plan(request, first, step):
    planned, naive, memory = request.getfixturevalue(first)
    assert equal(*both(planned, naive, step))
    memory.next_step()
    if step is not frozen_later:
        assert equal(*both(planned, naive, backward))


# Whoever keeps something


def of_hooks(model):
    found = []
    handles = [parameter.register_hook(found.append) for parameter in model.parameters()]
    backward(model)
    for handle in handles:
        handle.remove()
    backward(model, seed=1)  # over whatever is not held
    return found


def asked_for(model):
    loss = model(*batch(3, 7, 9))
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    backward(model, seed=1)
    return found


def in_lists(model):
    found = []
    for seed in range(3):
        model.zero_grad()
        found += backward(model, seed)
    return found


@pytest.mark.parametrize("step", [of_hooks, asked_for, in_lists])
def test_gradients_may_be_kept(pair_with_gradients, step):
    planned, naive, memory = pair_with_gradients
    leaves(memory, *both(planned, naive, step))


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

    leaves(memory, *both(planned, naive, step))


def test_copies_and_files_of_gradients_hold_them_alone(pair):
    planned, naive, memory = pair
    found, expected = both(planned, naive, backward)
    copies, file = copy.deepcopy(found), io.BytesIO()
    torch.save(found, file)
    assert file.tell() < 2 * sum(one.nbytes for one in found) + 1e5
    file.seek(0)
    assert equal(torch.load(file), expected)
    copied = copy.deepcopy(planned)
    backward(planned, 1)
    leaves(memory, copies, expected)
    assert all(one is None or not inside(memory, one) for one in gradients(copied))


def test_forked_processes_see_gradients(pair):
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


def test_a_plan_leaves_nothing_for_forks_behind(pair, monkeypatch):
    planned, *_ = pair
    monkeypatch.setattr(os, "register_at_fork", lambda **_: pytest.fail("it stays for good"))
    plan_memory(planned, largest(planned))


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


@pytest.mark.parametrize(
    "view",
    [
        lambda gradient: gradient[1:],
        *(
            pytest.param(view, marks=pytest.mark.thorough)
            for view in (torch.Tensor.detach, torch.Tensor.numpy, torch.Tensor.untyped_storage)
        ),
    ],
)
def test_a_view_that_is_kept_is_an_error_until_it_is_gone(pair, view):
    planned, naive, _ = pair
    weight = planned.decoder[1].feed_forward.fc2_weight
    both(planned, naive, backward)
    kept, value = view(weight.grad), weight.grad.clone()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"fc2_weight of decoder.1 {VIEW}"):
            planned(*batch(3, 7, 9))
        assert torch.equal(weight.grad, value)
    del kept
    gc.collect()
    for model in (planned, naive):
        model.zero_grad()
    assert equal(*both(planned, naive, backward))


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_keeps_what_lsq_cannot_move(pair, hook):
    """A view, or a gradient that it takes away, of which lsq does not know any more."""
    planned, _, _ = pair
    weight, kept = planned.encoder[0].feed_forward.fc1_weight, []

    def take(given):
        if hook == "register_hook":
            kept.append(given[1:])
        else:
            kept.append(given.grad)
            given.grad = None

    getattr(weight, hook)(take)
    backward(planned)
    value = kept[0].clone()
    with pytest.raises(RuntimeError, match=f"d_feed_forward.fc1_weight of encoder.0 {VIEW}"):
        planned(*batch(3, 7, 9))
    assert torch.equal(kept[0], value)


class Stack(torch.nn.Module):
    """Layers one after another on packed rows: results go straight from program to program."""

    def __init__(self):
        super().__init__()
        config = config_of(backward="int8", dropout=0.1, calibration_passes=0)
        self.layers = torch.nn.ModuleList(TransformerEncoderLayer(config) for _ in range(4))
        self.look = lambda x: None

    def forward(self, x):
        for layer in self.layers:
            x = layer.rows(x, PACKING)
            self.look(x)
        return x.square().sum()


@pytest.fixture(params=["planned", "guard"])
def stacks(request):
    """(planned, naive, memory, x): equal stacks of layers, and rows for them."""
    torch.manual_seed(0)
    planned, x = Stack(), torch.randn(8, 48)
    naive = copy.deepcopy(planned)
    memory = plan_memory(planned, lambda: planned(x), mode=request.param)
    for model in (planned, naive):
        torch.manual_seed(1)
        model(x)
    return planned, naive, memory, x


def test_results_and_their_gradients_go_from_program_to_program(stacks):
    planned, naive, memory, x = stacks
    borrowed, kept = [], [planned(x), naive(x)]  # which never go back
    planned.look = lambda y: borrowed.append(inside(memory, y))

    def step(model, layers=slice(None)):
        model.zero_grad()
        model.layers, every = model.layers[layers], model.layers
        model(x).backward()
        model.layers = every
        return gradients(model)

    for _ in range(3):
        assert equal(*both(planned, naive, step)) and len(kept) == 2
    assert borrowed == 3 * [True, True, True, False]
    crossed = {
        key
        for one in memory.step.passes
        for key, border, _ in crossing(one)
        if border.role != "parameter"
    }
    assert len(memory.step.borrowed.keys() & crossed) == 6  # three results, and their gradients
    for _ in range(2):
        assert equal(*both(planned, naive, lambda model: step(model, slice(None, None, 2))))


def test_results_may_be_kept(stacks):
    planned, naive, memory, x = stacks

    def step(model):
        kept = []
        model.look = lambda y: (y.retain_grad(), kept.append(y))
        model(x).backward()
        model.look = lambda y: None
        model(x).backward()
        return [*kept, *(y.grad for y in kept), *gradients(model)]

    leaves(memory, *both(planned, naive, step))


def test_a_view_of_a_result_is_an_error(stacks):
    planned, _, _, x = stacks
    kept = []
    planned.look = lambda y: kept.append(y.detach())
    with pytest.raises(RuntimeError, match="of layers.0 lies in planned memory .*clone the views"):
        planned(x).backward()


def _train(rank: int, bucket_view: bool) -> bool:
    """Whether planned and naive workers have the same gradients after each step."""
    models = twins(backward="int8")
    plan_memory(models[0], largest(models[0]))
    found = []
    for model in models:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
        torch.manual_seed(rank)
        steps = []
        for step in range(5):
            if step % 2:
                model.zero_grad(set_to_none=step != 3)
            with wrapped.no_sync() if step == 2 else torch.enable_grad():
                wrapped(*batch(3, 7, 9, seed=2 * step + rank)).backward()
            steps += [gradient.clone() for gradient in gradients(model)]
        found.append(steps)
    return equal(*found)


@pytest.mark.parametrize("bucket_view", [False, True])
def test_data_parallel_workers(bucket_view):
    assert run_processes(_train, 2, bucket_view) == [True, True]
