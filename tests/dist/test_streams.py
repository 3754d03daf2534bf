"""Exchanges on a side stream, in the emulator: all that touches a gradient is ordered, and so is the end of its memory."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from lsq.dist import executor, gcq, two_hop
from lsq.dist.codec import Codec
from lsq.dist.config import GradientConfig
from lsq.dist.executor import SideStream
from lsq.dist.feedback import ErrorFeedback
from lsq.dist.gcq import GCQ
from lsq.dist.hooks import GradientCompression
from lsq.dist.scratch import Scratch
from lsq.dist.topology import Topology
from lsq.dist.two_hop import TwoHop
from tests.csrc.emulated_torch import OnStreams, StreamFuture

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
CPU = torch.device("cpu")
SIZES = (300, 1_100, 700)


class Pair:
    """A group of two workers, both of which have what this one has."""

    def size(self):
        return 2

    def rank(self):
        return 0


class Bucket:
    """What DDP gives its hook."""

    def __init__(self, index, parameter, buffer):
        self.index, self.parameters, self.buffer = lambda: index, lambda: [parameter], lambda: buffer


@pytest.fixture
def streams(monkeypatch):
    """The streams, and collectives that run on another one, as NCCL's do."""
    streams = OnStreams(monkeypatch)
    monkeypatch.setattr(executor, "Future", lambda devices: StreamFuture(streams))
    accelerator = SimpleNamespace(current_stream=lambda device: streams.current)
    monkeypatch.setattr(executor, "torch", SimpleNamespace(Stream=streams.stream, accelerator=accelerator))
    nccl = streams.stream()

    def collective(copy):
        def run(out, *arguments, **options):
            caller = streams.current
            nccl.wait_stream(caller)
            with streams.on(nccl):
                copy(out.view(-1), *arguments)
            caller.wait_stream(nccl)

        return run

    def all_to_all(out, given, group, received=None, sent=None):
        out.view(2, -1).copy_(given.view(-1)[: len(out) // 2])

    def all_gather(out, own, group):
        out.view(2, -1).copy_(own.view(-1))

    monkeypatch.setattr(two_hop, "all_to_all", collective(all_to_all))
    monkeypatch.setattr(two_hop, "all_gather", collective(all_gather))
    monkeypatch.setattr(gcq.distributed, "all_reduce", collective(lambda codes: codes.add_(codes)))
    return streams


def averages(mode):
    scratch, group = Scratch(CPU), Pair()
    codec = Codec(block=256, first_bits=4 if mode == "int4_hier" else 8, stochastic=mode != "int8", device=CPU)
    if mode == "gcq":
        return GCQ(group, GradientConfig().row, GradientConfig().quantile, scratch)
    return TwoHop(group, codec, scratch, group if mode.endswith("_hier") else None)


class Training:
    """Steps of a training whose gradients go through GradientCompression, as DDP calls it."""

    def __init__(self, streams, mode, error_feedback):
        self.streams, self.main = streams, streams.stream()
        self.compression = GradientCompression(mode, Topology(world_size=2, rank=0, node_size=1), Pair())
        self.compression._average, self.compression._executor = averages(mode), SideStream(CPU)
        with streams.on(self.main):
            self.parameters = [torch.zeros(size) for size in SIZES]
        if error_feedback:
            names = [(f"p{size}", parameter) for size, parameter in zip(SIZES, self.parameters, strict=True)]
            self.compression._feedback = ErrorFeedback(names)

    def step(self):
        with self.streams.on(self.main):
            exchanges = []
            for index, parameter in enumerate(self.parameters):
                gradient = torch.randn_like(parameter).mul_(2)  # while those before it travel
                exchanges.append(self.compression.exchange(Bucket(index, parameter, gradient)))
            for parameter, exchange in zip(self.parameters, exchanges, strict=True):
                parameter.sub_(exchange.wait(), alpha=0.1)


@pytest.mark.parametrize("mode", ["int8", "int8_hier", "int4_hier", "gcq"])
@pytest.mark.parametrize("error_feedback", [False, True])
def test_exchanges_are_ordered_with_the_backward_pass(streams, mode, error_feedback):
    with streams:
        training = Training(streams, mode, error_feedback)
        for _ in range(3):
            training.step()
        with streams.on(training.main):
            assert all(parameter.isfinite().all() for parameter in training.parameters)
    assert not streams.faults, "\n".join(streams.faults)


def test_residuals_are_saved_and_loaded_between_steps(streams):
    with streams:
        training = Training(streams, "int8", error_feedback=True)
        for _ in range(2):
            training.step()
            with streams.on(training.main):
                training.compression.load_state_dict(training.compression.state_dict())
            training.step()
    assert not streams.faults, "\n".join(streams.faults)


def test_an_exchange_that_does_not_wait_is_reported(streams, monkeypatch):
    with streams:
        training = Training(streams, "int8", error_feedback=False)
        monkeypatch.setattr(training.compression._executor.stream, "wait_stream", lambda other: None)
        with pytest.raises(RuntimeError, match=r"PackGradients: .* reads .*mul_.* wrote on stream .* nothing orders"):
            training.step()
