"""Trainings of several processes on a device with streams: the test device, whose process group
works as NCCL's does."""

import json
import os
import signal
import socket
from datetime import timedelta

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lsq.dist import compress_gradients, roll_call
from lsq.dist.agreement import any_process, require_same
from lsq.dist.fsdp import compress_reduce_scatter
from lsq.dist.roll_call import ExchangeFailed, naming_the_lost
from lsq.layers import TransformerEncoderLayer
from lsq.optim import Adam
from lsq.run.backends import backend
from tests.device import build, group
from tests.device.standin import PLACE, ordered
from tests.device.watch import watched
from tests.dist.net import Net, batch, config, flat_gradients
from tests.dist.processes import CONTEXT, run
from tests.layers.shapes import HIDDEN, config_of
from tests.sampling import first

WORKERS, LOST, LAST = 3, 1, 2
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
    streams, found = set(), []
    for lane in compression._lanes:
        exchange = lane.average.average
        lane.average.average = lambda *of, exchange=exchange: (
            streams.add(torch.accelerator.current_stream(PLACE)),
            exchange(*of),
        )[1]
    for step in range(STEPS):
        x = batch(rank, step).pin_memory().to(PLACE, non_blocking=True)
        net.zero_grad()
        with ordered(), watched() as record:
            model(x).square().sum().backward()
        found.append((flat_gradients(net).cpu(), record.table(record.waits)))
    assert streams == {lane.executor.stream for lane in compression._lanes}
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
    ("mode", "workers"), first([("int8", 2), ("int8_hier", 4), ("gcq", 2), ("bf16", 2)], 1)
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
    (lane,) = compress_gradients(model, config("int8"))._lanes
    executor = lane.executor
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


def input_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(5, 3, HIDDEN, generator=generator)


def write_gradients(rank: int, copied: bool) -> list[tuple[torch.Tensor, int, list[bool]]]:
    """(gradients, launches of PyTorch, which parameters' gradients can be written to) of steps."""
    torch.manual_seed(1)
    layer = TransformerEncoderLayer(config_of(backward="int8")).to(PLACE)
    model = DistributedDataParallel(layer, gradient_as_bucket_view=True)
    compression = compress_gradients(model, config("int8"))
    if copied:
        compression._buckets = None
    found = []
    for step in range(4):
        x = input_of(rank, step).to(PLACE)
        torch.manual_seed(10 * rank + step)
        layer.zero_grad()
        with ordered(), watched() as record:
            model(x).square().mean().backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        aligned = [gradient.data_ptr() % 16 == 0 for gradient in gradients]
        found.append(
            (torch.cat([one.flatten() for one in gradients]).cpu(), len(record.launches), aligned)
        )
    return found


@pytest.mark.thorough
def test_gradients_that_can_be_are_written_into_their_buckets():
    spared, copied = on_device(write_gradients, 2, False), on_device(write_gradients, 2, True)
    for of_rank, others in zip(spared, copied, strict=True):
        for step, ((found, launches, aligned), (wanted, more, _)) in enumerate(
            zip(of_rank, others, strict=True)
        ):
            assert torch.equal(found, wanted), step
            if (
                step == 3
                # the second step is the last with other buckets, the third the first without
                # measuring
            ):
                assert 0 < sum(aligned) < len(aligned)
                assert more - launches == sum(aligned), (more, launches, aligned)


def train_sharded(
    rank: int, place: torch.device, compressed: bool
) -> list[dict[str, torch.Tensor]]:
    """Shards of this process after each step.

    The first one measures clips by largest values, as all devices do.
    """
    torch.manual_seed(1)
    config = config_of(backward="int8", dropout=0.1, clip_init="absmax")
    model = nn.Sequential(TransformerEncoderLayer(config)).to(place)
    model[0].backend = None if place == PLACE else backend("emulated")
    fully_shard(model[0])
    fully_shard(model)
    if compressed:
        compress_reduce_scatter(model)
    optimizer, found = Adam(model.parameters(), lr=0.01, backend=model[0].target), []
    for step in range(2):
        torch.manual_seed(10 * rank + step)
        with ordered() if place == PLACE and step else torch.enable_grad():
            model(input_of(rank, step).to(place)).square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        found.append(
            {name: one.detach().to_local().cpu().clone() for name, one in model.named_parameters()}
        )
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("compressed", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_training_is_the_cpus_and_ordered(compressed):
    found, wanted = (
        on_device(train_sharded, 2, PLACE, compressed),
        run(train_sharded, 2, torch.device("cpu"), compressed),
    )
    for of_rank, of_cpu in zip(found, wanted, strict=True):
        for step, (here, there) in enumerate(zip(of_rank, of_cpu, strict=True)):
            for name, tensor in there.items():
                bits = {} if compressed else {"rtol": 0.0, "atol": 0.0}
                torch.testing.assert_close(
                    here[name], tensor, **bits, msg=lambda text, at=(step, name): f"{at}: {text}"
                )


def lose(rank: int, folder: str, mode: str, last_words: str | None) -> None:
    """Steps of DDP; at one of them a process is killed, or fails with `last_words`.

    The others write what they saw.
    """
    group.register()
    distributed.init_process_group(
        group.NAME,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORKERS,
        timeout=timedelta(seconds=30),
    )
    roll_call.PERIOD_S = 0.05
    roll_call.register()
    model = DistributedDataParallel(Net().to(PLACE), bucket_cap_mb=0.001)
    compress_gradients(model, config(mode))
    try:
        with naming_the_lost():
            for step in range(100):
                if (rank, step) == (LOST, LAST):
                    if last_words is not None:
                        raise ValueError(last_words)
                    os.kill(os.getpid(), signal.SIGKILL)
                model(batch(rank, step).to(PLACE)).square().sum().backward()
                any_process(False, PLACE)
    except ExchangeFailed as error:
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump([step, type(error).__name__, str(error)], file)
    finally:
        os._exit(0)  # without the group's own farewell, which needs the others


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "last_words"), first([("int8", None), ("bf16", "sentence 7 is too long")], 1)
)
def test_the_survivors_name_the_one_that_is_gone(tmp_path, mode, last_words):
    started = [
        CONTEXT.Process(target=lose, args=(rank, str(tmp_path), mode, last_words))
        for rank in range(WORKERS)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
        process.kill()
        process.join()
    for rank in {*range(WORKERS)} - {LOST}:
        step, kind, message = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (step, kind) == (LAST, "RankLost")
        place = f"host {socket.gethostname()}, process id {started[LOST].pid}"
        ended = "" if last_words is None else f"; rank {LOST} ended with ValueError: {last_words}"
        assert message.startswith(
            f"rank {LOST} (of {WORKERS}, {place}) no longer answers{ended}: gloo"
        ), message
