"""Results and gradients in planned memory that are lent: the same numbers, and nothing that is kept
is overwritten."""

import copy
import gc

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lsq.layers import Packing, TransformerEncoderLayer, VocabularyProjection
from lsq.layers.memory import plan_memory
from lsq.run.step import crossing
from tests.dist.processes import run as run_processes
from tests.layers.shapes import config_of
from tests.layers.toy import PADDING, VOCABULARY, batch, largest, twins
from tests.run.borrowing import backward, both, equal, gradients, inside


@pytest.fixture
def pair():
    """(planned, naive, memory): equal translators, whose parameters have gradients."""
    planned, naive = twins(backward="int8", calibration_passes=0)
    memory = plan_memory(planned, largest(planned))
    for model in (planned, naive):
        torch.manual_seed(0)
        model(*batch(3, 7, 9)).backward()
    return planned, naive, memory


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


def test_contributions_to_a_shared_table_are_added_in_its_first_place(pair):
    planned, _, memory = pair
    table = planned.embedding.weight
    tables = {}
    for one in memory.step.passes:
        for key, border, source in crossing(one):
            if one.backward and border.shape == table.shape:
                tables.setdefault(source, []).append(key)
    ((first, *others),) = tables.values()
    lent = [memory.step.borrowed[key] for key in (first, *others)]
    assert [one.keep for one in lent] == [False, True, True] and lent[0].until == max(
        one.until for one in lent
    )
    before = table.grad.clone()
    backward(planned)
    total = memory.arena.tensor(memory.step.offsets[first], table.shape, table.dtype)
    torch.testing.assert_close(table.grad, before + total)
    assert total.abs().sum() > 0


def test_a_projection_of_its_own():
    planned, naive = twins(backward="int8")
    for model in (planned, naive):
        torch.manual_seed(2)
        model.projection = VocabularyProjection(
            VOCABULARY, 48, quant=model.projection.quant, padding_idx=PADDING
        )
    plan_memory(planned, largest(planned))
    for _ in range(3):
        assert equal(*both(planned, naive, backward))


def test_hooks_may_keep_gradients(pair):
    planned, naive, memory = pair

    def kept(model):
        found = []
        handles = [parameter.register_hook(found.append) for parameter in model.parameters()]
        backward(model)
        for handle in handles:
            handle.remove()
        backward(model, seed=1)  # over whatever is not held
        return found

    found, expected = both(planned, naive, kept)
    memory.next_step()
    assert equal(found, expected) and not any(inside(memory, gradient) for gradient in found)


def test_gradients_that_are_asked_for(pair):
    planned, naive, memory = pair

    def asked(model):
        found = torch.autograd.grad(
            model(*batch(3, 7, 9)), list(model.parameters()), allow_unused=True
        )
        backward(model, seed=1)
        return found

    found, expected = both(planned, naive, asked)
    memory.next_step()
    assert equal(found, expected) and not any(
        inside(memory, one) for one in found if one is not None
    )


def test_a_view_that_is_kept_is_an_error_until_it_is_gone(pair):
    planned, naive, _ = pair
    kept = []
    handle = planned.encoder[0].feed_forward.fc1_weight.register_hook(
        lambda gradient: kept.append(gradient[1:])
    )
    with pytest.raises(
        RuntimeError,
        match="d_feed_forward.fc1_weight of encoder.0 lies in planned memory .* a view",
    ):
        backward(planned)
        planned(*batch(3, 7, 9))
    handle.remove()
    value = kept[0].clone()
    with pytest.raises(
        RuntimeError, match="clone the views of results and gradients .*--lsq-memory naive"
    ):
        planned(*batch(3, 7, 9))
    assert torch.equal(kept[0], value)
    kept.clear()
    gc.collect()
    for model in (planned, naive):
        model.zero_grad()
    assert equal(*both(planned, naive, backward))


@pytest.mark.parametrize("to_none", [False, True])
def test_the_first_contribution_may_be_left_out(pair, to_none):
    """Without the loss, the table's first gradient is one that was planned to be added to
    another."""
    planned, naive, memory = pair

    def without_loss(model):
        model.zero_grad(set_to_none=to_none)
        source, target = batch(3, 7, 9)
        (model.embedding(source).square().sum() + model.embedding(target).sum()).backward()
        return [model.embedding.weight.grad]

    for _ in range(2):
        assert equal(*both(planned, naive, without_loss))
        assert not inside(memory, planned.embedding.weight.grad)


def test_a_layer_that_is_left_out(pair):
    planned, naive, _ = pair

    def shorter(model):
        model.encoder, kept = model.encoder[:1], model.encoder
        backward(model)
        model.encoder = kept
        return gradients(model)

    assert equal(*both(planned, naive, shorter))
    assert equal(*both(planned, naive, backward))


def test_parameters_that_are_frozen_later(pair):
    planned, naive, _ = pair
    for model in (planned, naive):
        model.encoder[0].feed_forward.fc1_weight.requires_grad_(False)
    assert equal(*both(planned, naive, backward))


class Stack(torch.nn.Module):
    """Layers one after another on packed rows: results go straight from program to program."""

    def __init__(self):
        super().__init__()
        config = config_of(backward="int8", dropout=0.1, calibration_passes=0)
        self.layers = torch.nn.ModuleList(TransformerEncoderLayer(config) for _ in range(4))
        self.look = lambda x: None

    def forward(self, x):
        packing = Packing(shape=(2, 4))
        for layer in self.layers:
            x = layer.rows(x, packing)
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
    places = []
    planned.look = lambda y: places.append(inside(memory, y))

    def step(model):
        model.zero_grad()
        model(x).backward()
        return gradients(model)

    for _ in range(3):
        assert equal(*both(planned, naive, step))
    assert places == 3 * [True, True, True, False]
    lent = [
        key
        for one in memory.step.passes
        for key, border, _ in crossing(one)
        if border.role != "parameter"
    ]
    assert len(memory.step.borrowed.keys() & set(lent)) == 6  # three results, and their gradients


def test_results_may_be_kept(stacks):
    planned, naive, memory, x = stacks

    def step(model):
        kept = []
        model.look = lambda y: (y.retain_grad(), kept.append(y))
        model(x).backward()
        model.look = lambda y: None
        model(x).backward()
        return [*kept, *(y.grad for y in kept), *gradients(model)]

    found, expected = both(planned, naive, step)
    memory.next_step()
    assert equal(found, expected) and not any(inside(memory, tensor) for tensor in found)


def test_a_view_of_a_result_is_an_error(stacks):
    planned, _, _, x = stacks
    kept = []
    planned.look = lambda y: kept.append(y.detach())
    with pytest.raises(
        RuntimeError, match="of layers.0 lies in planned memory .*clone the views of results"
    ):
        planned(x).backward()


def test_layers_that_are_left_out_read_what_others_made(stacks):
    planned, naive, _, x = stacks

    def step(model):
        model.layers, kept = model.layers[::2], model.layers
        model(x).backward()
        model.layers = kept
        return gradients(model)

    for _ in range(2):
        assert equal(*both(planned, naive, step))


def test_a_step_that_never_goes_back(stacks):
    planned, naive, _, x = stacks
    kept = [planned(x), naive(x)]

    def step(model):
        model(x).backward()
        return gradients(model)

    assert equal(*both(planned, naive, step)) and len(kept) == 2


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
