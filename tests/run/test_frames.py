"""Passes off planned memory: prepared once, the same bits as operation by operation, no memory held
in between."""

import gc
import threading
import weakref

import pytest
import torch

from lsq.commands.step_memory import traced_peak
from lsq.layers import TransformerEncoderLayer
from lsq.memory.kept import SMALLEST, nothing_kept
from lsq.ops.calibration import LeastErrorClip
from lsq.ops.rounding import RoundWeight
from lsq.run import frames
from lsq.run.backends import backend
from lsq.run.executor import profile
from tests.layers.shapes import config_of
from tests.run.test_prepared import equal, run


@pytest.fixture
def layer() -> TransformerEncoderLayer:
    """A layer with measured clips."""
    torch.manual_seed(0)
    found = TransformerEncoderLayer(config_of(backward="int8", dropout=0.15, calibration_passes=0))
    found(torch.randn(3, 2, 48))
    return found


@pytest.fixture
def prepared(monkeypatch) -> list[int]:
    """How many operations are prepared together from here on, those that measure or round weights
    left out."""
    where, found = backend("cpu"), []
    original = where.prepare

    def prepare(calls):
        if not isinstance(calls[0][0], (LeastErrorClip, RoundWeight)):
            found.append(len(calls))
        return original(calls)

    monkeypatch.setattr(where, "prepare", prepare)
    return found


def one_by_one(layer, x: torch.Tensor) -> list[torch.Tensor]:
    """The same, operation by operation."""
    with profile():
        return run(layer, x)


def test_a_pass_is_prepared_once_and_gives_the_same_bits_every_time(layer, prepared):
    x, other = torch.randn(4, 2, 48), torch.randn(4, 2, 48)
    expected = one_by_one(layer, x), one_by_one(layer, other)
    prepared.clear()
    assert equal(run(layer, x), expected[0]) and len(prepared) == 2
    for parameter in layer.parameters():
        parameter.data = parameter.data.clone()
    assert (
        equal(run(layer, other), expected[1])
        and equal(run(layer, x), expected[0])
        and len(prepared) == 2
    )
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


def test_nothing_is_held_between_two_runs(layer):
    x = torch.randn(4, 2, 48)
    found = [weakref.ref(tensor) for tensor in run(layer, x)]
    gc.collect()
    assert all(one() is None for one in found)
    held = []
    with torch.no_grad():
        traced_peak(lambda: layer(x))
        held.append(traced_peak(lambda: [layer(x) for _ in range(2)]))
        held.append(traced_peak(lambda: [layer(x) for _ in range(8)]))
    assert held[1] - held[0] <= 6 * x.nbytes + 4096  # results alone


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
    with (
        pytest.raises(
            ValueError, match=r"is torch.float64 with strides .*must be a contiguous tensor of"
        ),
        widened,
    ):
        run(layer, x)
    assert equal(run(layer, x), expected)
