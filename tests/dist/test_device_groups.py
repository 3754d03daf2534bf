"""DDP and its hooks on a device with streams: the test device, whose process group works as NCCL's
does."""

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from lsq.dist import compress_gradients
from lsq.dist.agreement import any_process, require_same
from tests.device import build, group
from tests.device.standin import PLACE, ordered
from tests.device.watch import watched
from tests.dist.net import Net, batch, config, flat_gradients
from tests.dist.processes import run
from tests.sampling import first

STEPS, REBUILDING = 3, 1
"""DDP puts parameters into other buckets once, before the second step, and waits for that."""


@pytest.fixture(autouse=True, scope="module")
def device() -> None:
    try:
        build.library()
    except build.CannotBuild as error:
        pytest.skip(str(error))


def on_device(function, workers: int, *arguments):
    return run(function, workers, *arguments, backend=group.NAME, prepare=group.register)


def steps(rank: int, mode: str) -> list[tuple[torch.Tensor, str]]:
    """(gradients, what the host waited for) of steps of DDP with small buckets, all exchanged on
    the side stream.

    All that touches memory is ordered.
    """
    net = Net().to(PLACE)
    model = DistributedDataParallel(net, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    compression = compress_gradients(model, config(mode))
    average, streams, found = compression._average, set(), []
    if average is not None:
        exchange = average.average
        average.average = lambda *of: (
            streams.add(torch.accelerator.current_stream(PLACE)),
            exchange(*of),
        )[1]
    for step in range(STEPS):
        x = batch(rank, step).pin_memory().to(PLACE, non_blocking=True)
        net.zero_grad()
        with ordered(), watched() as record:
            model(x).square().sum().backward()
        found.append((flat_gradients(net).cpu(), record.table(record.waits)))
    assert average is None or streams == {compression._executor.stream}
    return found


def steps_on_cpu(rank: int, mode: str) -> list[torch.Tensor]:
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    compress_gradients(model, config(mode))
    found = []
    for step in range(STEPS):
        net.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        found.append(flat_gradients(net))
    return found


@pytest.mark.parametrize(
    ("mode", "workers"), first([("int8", 2), ("int8_hier", 4), ("gcq", 2), ("bf16", 2)], 2)
)
def test_gradients_are_the_cpus_and_nothing_waits(mode, workers):
    results, wanted = on_device(steps, workers, mode), run(steps_on_cpu, workers, mode)
    for of_rank, of_cpu in zip(results, wanted, strict=True):
        for step, (gradients, waits), exact in zip(range(STEPS), of_rank, of_cpu, strict=True):
            torch.testing.assert_close(gradients, exact, atol=1e-6, rtol=1e-5)
            assert not waits or step == REBUILDING, waits


def agreements(rank: int) -> list:
    world = distributed.group.WORLD
    found = [any_process(rank == 1, PLACE), any_process(False, PLACE)]
    require_same("the number", {"number": 3}, world, PLACE)
    with pytest.raises(ValueError, match="the number must be the same in every process"):
        require_same("the number", {"number": rank}, world, PLACE)
    return found


def test_processes_agree():
    assert on_device(agreements, 2) == [[True, False], [True, False]]


def mixed(rank: int) -> str:
    with pytest.raises(RuntimeError, match="it takes those of one device standin"):
        distributed.all_reduce(torch.ones(3))
    x = torch.full((3,), rank + 1.0, device=PLACE)
    with watched() as record:
        work = distributed.all_reduce(x, async_op=True)
        work.wait()
    assert x.tolist() == [3.0, 3.0, 3.0]
    return record.table(record.waits)


def test_the_group_takes_tensors_of_its_device_and_lets_no_host_wait():
    assert on_device(mixed, 2) == ["", ""]


def unordered(rank: int) -> None:
    model = DistributedDataParallel(Net().to(PLACE), bucket_cap_mb=0.001)
    executor = compress_gradients(model, config("int8"))._executor
    executor.stream = type(
        "Careless",
        (),
        {
            "wait_stream": lambda self, other: None,
            "__enter__": lambda self: self.own.__enter__(),
            "__exit__": lambda self, *error: self.own.__exit__(*error),
            "own": executor.stream,
        },
    )()
    x = batch(rank, 0).to(PLACE)
    with pytest.raises(RuntimeError, match="nothing orders the two"), ordered():
        model(x).square().sum().backward()


def test_an_exchange_that_does_not_wait_for_the_gradient_is_reported():
    on_device(unordered, 2)
