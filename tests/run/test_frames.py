"""Passes on fresh and on planned memory: prepared once, the same bits as operation by operation,
nothing held in between."""

import gc
import threading
import weakref

import pytest
import torch

from lsq.commands.step_memory import traced_peak
from lsq.layers import TransformerEncoderLayer
from lsq.layers.memory import plan_memory
from lsq.memory.kept import SMALLEST, nothing_kept
from lsq.ops.calibration import LeastErrorClip
from lsq.ops.rounding import RoundWeight
from lsq.run import frames, planned
from lsq.run.backends import backend
from lsq.run.executor import profile
from tests.layers.shapes import config_of
from tests.layers.toy import batch, largest, twins


@pytest.fixture
def layer() -> TransformerEncoderLayer:
    """A layer with measured clips, on fresh memory."""
    torch.manual_seed(0)
    found = TransformerEncoderLayer(config_of(backward="int8", dropout=0.15, calibration_passes=0))
    found(torch.randn(3, 2, 48))
    return found


@pytest.fixture
def planned_layer(layer) -> TransformerEncoderLayer:
    """The same with memory for batches up to 5 x 2."""
    plan_memory(layer, lambda: layer(torch.ones(5, 2, 48)).sum())
    return layer


@pytest.fixture
def prepared(monkeypatch) -> list[list[str]]:
    """The names of the operations that are prepared together from here on, those that measure or
    round weights left out."""
    where, found = backend("cpu"), []
    original = where.prepare

    def prepare(calls):
        if not isinstance(calls[0][0], (LeastErrorClip, RoundWeight)):
            found.append([operation.name for operation, _ in calls])
        return original(calls)

    monkeypatch.setattr(where, "prepare", prepare)
    return found


def run(layer, x: torch.Tensor) -> list[torch.Tensor]:
    """Result and gradients of one pass there and back; none is left on the layer."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    found = [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]
    layer.zero_grad()
    return found


def one_by_one(layer, x: torch.Tensor) -> list[torch.Tensor]:
    """The same, operation by operation."""
    with profile():
        return run(layer, x)


def equal(found, expected) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_pass_is_prepared_once_and_gives_the_same_bits_every_time(layer, prepared):
    x, other = torch.randn(4, 2, 48), torch.randn(4, 2, 48)
    expected = one_by_one(layer, x), one_by_one(layer, other)
    prepared.clear()
    assert equal(run(layer, x), expected[0]) and len(prepared) == 2
    for parameter in layer.parameters():
        parameter.data = parameter.data.clone()
    assert equal(run(layer, other), expected[1]) and equal(run(layer, x), expected[0])
    assert len(prepared) == 2
    layer.eval()
    with torch.no_grad():
        results = [layer(x) for _ in range(3)]
    assert len(prepared) == 3 and equal(results[1:], results[:1] * 2)


def test_layers_of_one_kind_share_what_is_prepared(prepared):
    layers = [TransformerEncoderLayer(config_of(clip_init="fixed")).eval() for _ in range(3)]
    x = torch.randn(6, 2, 48)
    with torch.no_grad():
        results = [layer(x) for layer in layers]
        assert len(prepared) == 1
        with profile():
            assert equal([layer(x) for layer in layers], results)


@pytest.mark.parametrize("kind", ["layer", "planned_layer"])
def test_nothing_that_crossed_a_border_is_held(request, kind):
    layer, x = request.getfixturevalue(kind), torch.randn(4, 2, 48)
    for _ in range(2):
        run(layer, x)
    found = [weakref.ref(tensor) for tensor in run(layer, x)]
    gc.collect()
    assert all(one() is None for one in found)


def test_runs_hold_no_memory_but_results(layer):
    x = torch.randn(4, 2, 48)
    with torch.no_grad():
        traced_peak(lambda: layer(x))
        two, eight = (
            traced_peak(lambda runs=runs: [layer(x) for _ in range(runs)]) for runs in (2, 8)
        )
    assert eight - two <= 6 * x.nbytes + 4096


@pytest.mark.parametrize("training", [True, False])
def test_a_pass_takes_no_more_memory_than_its_operations_one_by_one(layer, training):
    x = torch.randn(40, 8, 48)
    step = (lambda: run(layer, x)) if training else torch.no_grad()(lambda: layer.eval()(x))
    traced_peak(step)  # codes that are made here are seen to go in the next
    whole = traced_peak(step)
    with profile():
        assert whole < 1.1 * traced_peak(step) + 4096


def test_memory_may_lie_elsewhere_in_every_run(layer, monkeypatch):
    x, followed, others = torch.randn(64, 4, 48), [], []
    follow = frames.PreparedPass.update
    monkeypatch.setattr(frames.PreparedPass, "update", lambda self: followed.append(follow(self)))
    expected = one_by_one(layer, x)
    with nothing_kept():
        for _ in range(20):
            assert equal(run(layer, x), expected)
            others += [torch.empty(size) for size in range(1 << 12, 1 << 19, 1 << 13)]
    assert followed


def test_kept_memory_is_used_again_and_gives_the_same_bits(layer):
    x = torch.randn(640, 4, 48)  # of 480 KB
    expected = one_by_one(layer, x)
    addresses = []
    for _ in range(4):
        found = run(layer, x)
        assert equal(found, expected)
        addresses.append(found[0].data_ptr())
        del found
    assert x.nbytes >= SMALLEST and addresses[1:] == addresses[:1] * 3


def test_threads_run_the_same_pass_at_one_time(layer):
    layer.eval()
    batches = torch.randn(8, 16, 4, 48)
    found = [None] * len(batches)
    barrier = threading.Barrier(len(batches))

    def work(number: int) -> None:
        barrier.wait()
        with torch.no_grad():
            found[number] = [layer(batches[number]) for _ in range(20)]

    with torch.no_grad():
        expected = [layer(x) for x in batches]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(equal(some, [one] * 20) for some, one in zip(found, expected, strict=True))


def test_inference_mode_leaves_nothing_that_gradients_cannot_use(layer):
    x = torch.randn(9, 2, 48)
    with torch.inference_mode():
        layer(x)
    run(layer, x)


def test_what_hooks_give_back_must_be_what_was_saved(layer):
    x = torch.randn(4, 2, 48)
    expected = run(layer, x)
    with torch.autograd.graph.save_on_cpu():
        assert equal(run(layer, x), expected)
    widened = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, torch.Tensor.double)
    message = "is torch.float64 with strides .*must be a contiguous tensor of"
    with pytest.raises(ValueError, match=message), widened:
        run(layer, x)
    assert equal(run(layer, x), expected)


# Planned memory


@pytest.mark.parametrize(
    "options", [{"backward": "int8"}, {"backward": "float", "pre_norm": True}, {"mode": "float"}]
)
def test_a_training_that_repeats_its_batches_gives_the_same_gradients(options):
    with_plan, naive = twins(**options)
    memory = plan_memory(with_plan, largest(with_plan))
    for step in range(4):
        results = []
        for model in (with_plan, naive):
            torch.manual_seed(step)
            model.zero_grad(set_to_none=step % 2 == 0)
            loss = model(*batch(3, 7, 9, seed=3))
            loss.backward()
            results.append([loss, *(parameter.grad for parameter in model.parameters())])
        assert equal(*results)
    assert len(memory.prepared) == len(memory.step.passes)


def test_a_planned_pass_is_prepared_when_it_comes_again_and_then_never(planned_layer, prepared):
    layer, x, other = planned_layer, torch.randn(4, 2, 48), torch.randn(4, 2, 48)
    first = run(layer, x)
    program = next(iter(layer.step_memory._fitting[0]))
    names = [operation.name for operation in program.operations]
    prepared.clear()
    second = run(layer, x)
    assert prepared == [names[: program.forward_length], names[program.forward_length :]]
    layer.train()
    layer.weight_state.clear()  # codes of weights lie elsewhere from now on
    for parameter in layer.parameters():
        parameter.data = parameter.data.clone()
    third, of_other = run(layer, x), run(layer, other)
    assert len(prepared) == 2 and equal(second, third) and equal(second, first)
    assert equal(of_other, one_by_one(layer, other))
    prepared.clear()
    run(layer, torch.randn(5, 2, 48))
    assert len(prepared) == len(names)


def test_whoever_looks_on_sees_every_operation(planned_layer):
    layer, x = planned_layer, torch.randn(4, 2, 48)
    for _ in range(3):
        expected = run(layer, x)
    seen = []
    layer._observer = lambda declared, operation: seen.append(declared.name)
    layer._observer.weights = lambda module, tensors: None
    assert equal(run(layer, x), expected) and len(seen) == 8
    layer._observer = None
    with profile() as seconds:
        assert equal(run(layer, x), expected)
    assert {"Attention", "AttentionGradient"} <= seconds.keys()
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = layer(x)
    with profile() as seconds:  # from here on the pass goes operation by operation
        y.square().sum().backward()
    assert seconds and torch.equal(x.grad, expected[1])


def test_a_run_that_fails_holds_nothing_and_the_next_one_is_right(planned_layer):
    layer, x = planned_layer, torch.randn(4, 2, 48)
    for _ in range(2):
        expected = run(layer, x)
    passes = list(layer.step_memory.prepared.values())

    def fail():
        raise KeyboardInterrupt

    original, passes[1]._run = passes[1]._run, fail
    with pytest.raises(KeyboardInterrupt):
        run(layer, x)
    passes[1]._run = original
    layer.zero_grad()
    assert equal(run(layer, x), expected)


def test_passes_used_last_are_kept(planned_layer, monkeypatch):
    monkeypatch.setattr(planned, "PREPARED_KEPT", 4)
    for _ in range(2):
        for length in (2, 3, 4):
            run(planned_layer, torch.randn(length, 2, 48))
    kept = planned_layer.step_memory.prepared
    assert len(kept) == 4 and {key[0].inputs[1].shape[0] for key in kept} == {6, 8}
