"""What the emulated backend runs is ordered on any streams: layers, lists that follow themselves,
captured lists."""

import shutil

import pytest
import torch

from lsq.layers import TransformerEncoderLayer
from lsq.layers.memory import plan_memory
from lsq.native.launch import Product
from tests.emulator.emulated import CudaError
from tests.emulator.emulated_streams import captured
from tests.emulator.emulated_torch import OnStreams
from tests.layers.shapes import config_of
from tests.native.test_runtime import store
from tests.sampling import first

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def streams(monkeypatch):
    return OnStreams(monkeypatch)


def trained(streams, planned, wait):
    """Steps of a layer, each on another stream than the one before."""
    layer = TransformerEncoderLayer(config_of(backward="int8", dropout=0.1, calibration_passes=0))
    layer.backend = streams.backend
    layer(torch.randn(3, 2, 48))
    if planned:
        plan_memory(layer, lambda: layer(torch.ones(5, 2, 48)).sum())
        streams.arenas.append(layer.step_memory.arena._slab)
    with streams:
        now, before = streams.stream(), streams.stream()
        for _ in range(4):
            with streams.on(now):
                x = torch.randn(4, 2, 48).requires_grad_()
                layer(x).square().mean().backward()
                with torch.no_grad():
                    for parameter in layer.parameters():
                        parameter.sub_(parameter.grad, alpha=0.01)
                        parameter.grad = None
            del x
            if wait:
                before.wait_stream(now)
            now, before = before, now


@pytest.mark.parametrize("planned", first([True, False], 0, 1))
def test_a_layer_trains_on_any_stream_that_waits_for_the_last_one(streams, planned):
    trained(streams, planned, wait=True)  # a use that nothing orders raises


def test_steps_that_do_not_wait_for_each_other_are_reported(streams):
    with pytest.raises(
        (CudaError, RuntimeError), match="which aten.sub_.Tensor wrote on stream .* nothing orders"
    ):
        trained(streams, planned=False, wait=False)


def work_of(streams):
    """A list with a product, and its result."""
    a, b = (torch.ones(size, 64, dtype=torch.int8) for size in (41, 48))
    out, memory = torch.zeros(41, 48, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    return streams.backend.target.list([store(memory, 0, 1), Product(a=a, b=b, out=out)]), a, out


@pytest.mark.parametrize("follows", [True, False])
def test_a_list_follows_itself_from_stream_to_stream(streams, follows, monkeypatch):
    if not follows:
        monkeypatch.setattr(streams.backend.target.driver, "follow", lambda before, after: None)
    work, _, _ = work_of(streams)
    with streams:
        with streams.on(streams.stream()):
            work.run()
        with streams.on(streams.stream()):
            if follows:
                work.run()
            else:
                with pytest.raises(
                    RuntimeError, match="store_values wrote on stream .* nothing orders the two"
                ):
                    work.run()


def test_a_captured_list_runs_beside_others_of_its_stream(streams):
    (work, a, out), (other, _, _) = work_of(streams), work_of(streams)
    with streams:
        stream, second = streams.stream(), streams.stream()
        with streams.on(stream):
            work.run()
            expected = out.clone()
            with captured(stream) as graph:
                work.run()
            a.mul_(2)
        second.wait_stream(stream)
        graph.launch(second)
        with streams.on(stream):
            other.run()
        with streams.on(second):
            assert torch.equal(out, 2 * expected)
    assert not streams.faults, "\n".join(streams.faults)
