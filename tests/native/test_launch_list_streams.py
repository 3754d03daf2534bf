"""Lists on several emulated streams and in captures share nothing, and graphs keep the addresses of
their capture."""

import shutil

import pytest
import torch

from lsq.ops.rounding import Round
from lsq.program.values import Coded
from lsq.quant import Format, Grain
from lsq.run import cuda
from lsq.run.cuda import CUDA
from lsq.run.frames import Slot
from tests.emulator.emulated import Driver
from tests.emulator.emulated_streams import Stream, captured, device, watched

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
FORM = Format(name="activation", bits=8, grain=Grain.TENSOR)


class Streams:
    """The emulated backend on a stream that a test says."""

    def __init__(self):
        self.driver, self.current = Driver(), None
        self.backend = CUDA(cuda.emulated_device.__wrapped__())
        self.backend.target.stream = lambda: self.current.handle.value
        self.first, self.second = Stream(self.driver), Stream(self.driver)

    def prepare(self, operation):
        """A run on a stream that is named."""
        self.current = self.first
        run = self.backend.prepare([(operation, ())])

        def on(stream):
            self.current = stream
            run()

        return on


@pytest.fixture
def streams() -> Streams:
    return Streams()


def rounding(scale: float = 1.0) -> Round:
    """Its kernel takes tickets."""
    x = scale * torch.randn(341, 512, generator=torch.Generator().manual_seed(0))
    codes, found = torch.empty(x.shape, dtype=torch.int8), torch.empty(1)
    return Round(
        x=x, rounded=Coded(format=FORM, codes=codes, scale=found, clip=torch.tensor([2.5]))
    )


def codes_of(operation: Round) -> torch.Tensor:
    return operation.reference()["rounded"]["codes"]


def slot(operation: Round, name: str) -> Slot:
    (leaf,) = (leaf for leaf in operation.leaves() if leaf.name == name)
    return Slot(operation, leaf)


def test_a_capture_takes_the_addresses_of_that_moment(streams):
    operation = rounding()
    run, before, other = streams.prepare(operation), operation.x, 2 * operation.x
    with captured(streams.first) as graph:
        run(streams.first)
    operation.rounded.codes.fill_(99)
    slot(operation, "x").put(other)
    graph.launch(streams.second)
    slot(operation, "x").put(before)
    assert torch.equal(operation.rounded.codes, codes_of(operation))
    slot(operation, "x").put(other)
    run(streams.first)
    assert torch.equal(operation.rounded.codes, codes_of(operation))


def test_graphs_of_lists_of_one_stream_may_run_side_by_side(streams):
    operations = [rounding(), rounding(2.0)]
    graphs = []
    for one in operations:
        run = streams.prepare(one)
        with captured(streams.first) as graph:
            run(streams.first)
        graphs.append((graph, run))
    with watched(streams.driver):
        graphs[0][0].launch(streams.first)
        graphs[1][0].launch(streams.second)
    for one in operations:
        assert torch.equal(one.rounded.codes, codes_of(one))


def test_a_stream_of_another_device_is_refused(streams):
    run = streams.prepare(rounding())
    with device(streams.driver, 1):
        other = Stream(streams.driver)
    with pytest.raises(
        RuntimeError, match="does not belong to the current context, which is that of device 0"
    ):
        run(other)
