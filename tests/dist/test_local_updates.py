"""LocalUpdates: rounds against formulas in float64, codes against their bounds, workers that come,
go and die."""

import contextlib
import copy
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import lsq
from lsq.config import QuantConfig
from lsq.dist import LocalUpdates, local_updates, roll_call
from lsq.dist.config import BLOCK
from lsq.dist.local_updates import MODES
from lsq.dist.roll_call import RankLost
from lsq.layers import QuantizedLinear
from lsq.optim import Adam
from tests.dist.net import Net, batch
from tests.dist.processes import ProcessFailed, run
from tests.sampling import first


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def train(model: nn.Module, optimizer, rank: int, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def every_step(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    net, plain = Net(), DistributedDataParallel(Net())
    local, ours, theirs = LocalUpdates(net, every=1, mode="float"), sgd(net), sgd(plain)
    for step in range(5):
        train(net, ours, rank, 1, step)
        assert local.step()
        train(plain, theirs, rank, 1, step)
    return flat(net), flat(plain)


def test_one_step_of_sgd_a_round_is_data_parallel_training():
    results = run(every_step, 3)
    for own, theirs in results:
        torch.testing.assert_close(own, theirs, rtol=1e-6, atol=1e-7)
        assert torch.equal(own, results[0][0])


def rounds(rank: int, mode: str, every: int, outer: dict) -> dict:
    """The shared weights after each of 3 rounds, and each worker's own before."""
    net = Net()
    local, optimizer = LocalUpdates(net, every=every, mode=mode, **outer), sgd(net)
    own, shared = [], [flat(net)]
    for number in range(3):
        for step in range(every):
            train(net, optimizer, rank, 1, every * number + step)
            if step == every - 1:
                own.append(flat(net))
            assert local.step() == (step == every - 1)
        shared.append(flat(net))
    return {"own": own, "shared": shared, "bytes": local.bytes_sent, "rounds": local.rounds}


@pytest.mark.parametrize("outer", [{}, {"learning_rate": 0.7, "momentum": 0.9}])
def test_the_outer_update_is_the_papers(outer):
    results = run(rounds, 2, "float", 3, outer)
    rate, momentum = outer.get("learning_rate", 1.0), outer.get("momentum", 0.0)
    wanted = results[0]["shared"][0].double()
    velocity = torch.zeros_like(wanted)
    for number in range(3):
        mean = torch.stack([one["own"][number] for one in results]).double().mean(0)
        change = wanted - mean
        velocity = momentum * velocity + change
        wanted = wanted - rate * (change + momentum * velocity)
        for one in results:
            torch.testing.assert_close(
                one["shared"][number + 1].double(), wanted, atol=1e-6, rtol=0
            )
    values = len(wanted)
    assert [one["bytes"] for one in results] == [3 * 4 * values] * 2  # of two workers half of 8


@pytest.mark.parametrize(("mode", "bits"), [("int8", 8 + 16 / BLOCK), ("int4", 4.25)])
def test_rounding_is_made_good_in_later_rounds(mode, bits):
    """The sum of three rounds' errors is one round's, not more; all workers hold the same bits."""
    results = run(rounds, 3, mode, 2, {})
    values, levels = len(results[0]["own"][0]), {"int8": 127, "int4": 7}[mode]
    for number in range(4):
        assert all(
            torch.equal(results[0]["shared"][number], one["shared"][number]) for one in results
        )
    for number in range(3):
        before, after = results[0]["shared"][number : number + 2]
        mean = torch.stack([one["own"][number] for one in results]).double().mean(0)
        largest = max((before - one["own"][number]).abs().max() for one in results)
        found = (after - mean).abs()
        assert 0 < found.max() <= 4 * largest / levels  # this round's errors and the last one's
        small = found[-7:]  # the bias of `spare`
        assert small.max() < 1e-7
    packed = results[0]["bytes"] / 3 / values
    assert packed == pytest.approx(2 * 2 / 3 * bits / 8, rel=0.2)  # padding of a small model


@pytest.mark.parametrize("mode, block, bound", [("int8", BLOCK, 0.51 / 127), ("int4", 32, 0.23)])
@pytest.mark.parametrize("hop", ["first", "second"])
def test_codes_are_near_and_what_is_not_finite_stays_so(mode, block, bound, hop):
    codec, blocks = MODES[mode], (3, 5 * BLOCK // block, block)
    values = torch.randn(3, 5 * BLOCK, generator=torch.Generator().manual_seed(1))
    values[1, :BLOCK] = 0.0
    values[2, 3], values[0, -1] = torch.nan, torch.inf
    layout = getattr(codec, hop)(values.numel(), 3)
    found = local_updates._unpack(codec, local_updates._pack(codec, values, layout), layout)
    poisoned = torch.zeros_like(values, dtype=torch.bool)
    poisoned[2, :block] = poisoned[0, -block:] = True
    assert not found[2, 3].isfinite() and not found[0, -1].isfinite()
    assert found[~poisoned].isfinite().all() and not found[1, :BLOCK].any()
    off, largest = (one.abs().view(blocks).amax(2) for one in (found - values, values))
    fine = ~poisoned.view(blocks)[..., 0]
    assert (off[fine] <= bound * largest[fine]).all()


class Layers(nn.Module):
    def __init__(self, clips: str):
        super().__init__()
        torch.manual_seed(0)
        self.hidden = QuantizedLinear(37 + 11, 64, quant=QuantConfig(clips=clips))
        self.last = QuantizedLinear(64, 16, quant=QuantConfig(clips=clips))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.pad(x, (0, 11), value=1.0)
        return self.norm(self.last(torch.relu(self.hidden(wide))))


def nodes_of_two(rank: int) -> torch.Tensor:
    """DistributedDataParallel inside of a node, rounds between two nodes."""
    inside = [distributed.new_group([0, 1]), distributed.new_group([2, 3])][rank // 2]
    between = [distributed.new_group([0, 2]), distributed.new_group([1, 3])][rank % 2]
    net = DistributedDataParallel(Net(), process_group=inside)
    local, optimizer = LocalUpdates(net, every=2, mode="int8", group=between), sgd(net)
    for step in range(4):
        train(net, optimizer, rank, 1, step)
        local.step()
    assert local.rounds == 2
    return flat(net)


def test_nodes_of_several_workers():
    results = run(nodes_of_two, 4)
    assert all(torch.equal(one, results[0]) for one in results)
    assert not torch.equal(results[0], flat(Net()))


def of_layers(rank: int, clips: str, mode: str) -> list[dict[str, torch.Tensor]]:
    net, states = Layers(clips), []
    local = LocalUpdates(net, every=3, mode=mode, learning_rate=0.7, momentum=0.9)
    optimizer = Adam(net.parameters(), lr=1e-3)
    for step in range(9):
        train(net, optimizer, rank, 1, step)
        if local.step():
            states.append({name: one.clone() for name, one in net.state_dict().items()})
    y = net(batch(0, 0))  # limits the steps of clips
    last = {name: one.detach().clone() for name, one in net.named_parameters()}
    states.append({**last, "y": y.detach()})
    return states


@pytest.mark.parametrize(("clips", "mode"), [("learned", "int4"), ("absmax", "int8")])
def test_layers_have_the_same_clips_weights_and_buffers(clips, mode):
    results = run(of_layers, 2, clips, mode)
    for states in zip(*results, strict=True):
        for name, one in states[0].items():
            assert torch.equal(one, states[1][name]), name
    last = results[0][-1]
    assert 0 < last["hidden.input_clip"] < 8 and 0 < last["hidden.weight_clip"].max() < 1


class Rounding(nn.Module):
    """A weight of codes or bfloat16, and one of floats."""

    def __init__(self, kind: str, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.wide, self.last = nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False)
        if kind == "bfloat16":
            self.wide.to(torch.bfloat16)
        else:
            lsq.convert(self.wide)
            lsq.train_codes(self.wide, remainder=kind == "16 bits")


def moved(rank: int, kind: str, mode: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The weights after each of 8 rounds in which worker 0 alone moves, by the least that the
    weight can hold; and how far that is, with a saved state in the middle."""
    net = Rounding(kind, seed=rank)
    local, found = LocalUpdates(net, every=1, mode=mode), []
    weight = net.wide.weight
    step = torch.zeros(64, 64)
    plain = weight.detach().float()
    step[:, 0] = plain[:, 0].abs() / 200 if kind == "bfloat16" else plain.abs().amax(1) / 100
    for number in range(8):
        if rank == 0:
            with torch.no_grad():
                weight.copy_(weight.detach().float() + step)
        local.step()
        found.append(weight.detach().float().clone())
        if number == 3:
            state = copy.deepcopy(local.state_dict())
            local = LocalUpdates(net, every=1, mode=mode)
            local.load_state_dict(state)
    return found, step


@pytest.mark.parametrize("kind", ["bfloat16", "8 bits", "16 bits"])
@pytest.mark.parametrize("mode", ["float", "int8"])
def test_weights_that_the_model_rounds_lose_no_change(kind, mode):
    """A third of the smallest step vanishes in each round's rounding, not in eight."""
    results = run(moved, 3, kind, mode)
    found, step = results[0]
    for others, _ in results[1:]:
        assert all(map(torch.equal, found, others))
    went = (found[-1] - found[0])[:, 0] / step[:, 0]
    assert 1.3 < went.mean() < 4, went.mean()  # 7 rounds of a third


def late(rank: int) -> None:
    net = Net()
    net.first.requires_grad_(False)
    local, optimizer = LocalUpdates(net, every=1), sgd(net)
    train(net, optimizer, rank, 1)
    local.step()
    net.first.requires_grad_(True)
    with pytest.raises(ValueError, match=r"does not know \(first.weight, first.bias\): make it"):
        local.step()


def test_parameters_that_train_later_are_refused():
    run(late, 2)


def resumed(rank: int, folder: str) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """A training of 10 steps, and one that is saved and loaded in the middle of a round."""
    options = {"every": 4, "mode": "int4", "momentum": 0.5}
    whole = Net()
    local, optimizer = LocalUpdates(whole, **options), torch.optim.Adam(whole.parameters())
    file = f"{folder}/{rank}.pt"
    for step in range(10):
        train(whole, optimizer, rank, 1, step)
        local.step()
        if step == 5:
            states = {"model": whole.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(states | {"local": local.state_dict()}, file)
    sent = local.bytes_sent
    net = Net()
    local, optimizer = LocalUpdates(net, **options), torch.optim.Adam(net.parameters())
    states = torch.load(file, weights_only=True)
    net.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    local.load_state_dict(states["local"])
    assert (local.rounds, local.steps) == (1, 2)
    for step in range(6, 10):
        train(net, optimizer, rank, 1, step)
        local.step()
    return flat(whole), flat(net), sent, local.bytes_sent


def test_a_resumed_training_is_the_same_bit_by_bit(tmp_path):
    for whole, again, sent, sent_again in run(resumed, 2, str(tmp_path)):
        assert torch.equal(whole, again) and sent == sent_again
    assert len(whole)


def frozen(rank: int) -> None:
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    net[0].requires_grad_(False)
    lsq.convert(net)
    lsq.freeze(net)
    with pytest.raises(ValueError, match=r"rank 0 has 0.weight='codes \w+' and rank 1 has 0.w"):
        LocalUpdates(net, every=1)


def test_frozen_codes_must_be_the_same():
    run(frozen, 2)


def other_mode(rank: int, first: str, second: str) -> torch.Tensor:
    net = Net()
    local, optimizer = LocalUpdates(net, every=2, mode=first), sgd(net)
    for step in range(4):
        train(net, optimizer, rank, 1, step)
        local.step()
    state = copy.deepcopy(local.state_dict())
    local = LocalUpdates(net, every=1, mode=second)
    local.load_state_dict(state)
    train(net, optimizer, rank, 1, 4)
    assert local.step() and local.rounds == 3
    return flat(net)


@pytest.mark.parametrize("modes", [("int8", "float"), ("float", "int8"), ("int4", "int8")])
def test_a_training_goes_on_in_another_mode(modes):
    first, second = run(other_mode, 2, *modes)
    assert torch.equal(first, second)


def of_another(rank: int) -> None:
    state = LocalUpdates(Net(), every=2).state_dict()
    with pytest.raises(ValueError, match="weight is None in the state .*, and .3, 3. here; give"):
        LocalUpdates(nn.Linear(3, 3), every=2).load_state_dict(state)
    with pytest.raises(ValueError, match="outer momentum is False .*, and True here; give the st"):
        LocalUpdates(Net(), every=2, momentum=0.5).load_state_dict(state)


def test_states_of_other_models_are_refused():
    run(of_another, 1)


def joined(rank: int) -> list[torch.Tensor]:
    """Workers with other weights each; after 3 steps they go on with one that is new, as rank 0."""
    torch.manual_seed(rank)
    net = Layers("absmax")
    nn.init.normal_(net.hidden.weight)
    net.norm.running_mean.fill_(rank)
    options = {"every": 2, "mode": "int8", "momentum": 0.5}
    local, optimizer = LocalUpdates(net, **options), sgd(net)
    found = [net.hidden.weight.detach().clone(), net.norm.running_mean.clone()]
    for step in range(3):
        train(net, optimizer, rank, 1, step)
        if local.step():
            found.append(net.hidden.weight.detach().clone())
    state = copy.deepcopy(local.state_dict())
    assert state["errors"].any()
    net = Layers("absmax") if rank == 0 else net
    before = copy.deepcopy(net.state_dict())
    local, optimizer = LocalUpdates(net, **options), sgd(net)
    net.load_state_dict(before)
    local.load_state_dict(None if rank == 0 else state)
    assert (local.rounds, local.steps) == (1, 0)
    assert not local.state_dict()["errors"].any()
    found.append(net.hidden.weight.detach().clone())
    for step in range(2):
        train(net, optimizer, rank, 1, step)
        local.step()
    return [*found, flat(net)]


def test_a_worker_that_joins_gets_the_weights_of_the_last_round():
    results = run(joined, 3)
    for one in results:
        for own, other in zip(one, results[0], strict=True):
            assert torch.equal(own, other)
    begun, buffers, after, again, _ = results[0]
    assert not buffers.any() and not torch.equal(begun, after) and torch.equal(after, again)


def diverged(rank: int) -> None:
    net = Net()
    local, optimizer = LocalUpdates(net, every=2, mode="int4"), sgd(net)
    for step in range(2):
        train(net, optimizer, rank, 1, step)
        local.step()
    kept = copy.deepcopy(local.state_dict())
    train(net, optimizer, rank, 2, 2)
    if rank == 1:
        net.first.weight.detach()[3, 4] = torch.nan
    own = flat(net)
    local.step()
    with pytest.raises(FloatingPointError, match="round 2.*one of them has diverged"):
        local.step()
    same(local, kept)
    assert torch.equal(own.nan_to_num(7.0), flat(net).nan_to_num(7.0))


def same(local: LocalUpdates, kept: dict) -> None:
    for name, one in local.state_dict().items():
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, kept[name]), name
    assert local.rounds == kept["rounds"]


def test_a_worker_that_has_diverged_spoils_nothing():
    run(diverged, 2)


def dying(rank: int, folder: str, place: str) -> None:
    """Rank 2 is killed in the second round, before the exchange that `place` names."""
    roll_call.PATIENCE_S = 1.0
    net = Net()
    local, optimizer = LocalUpdates(net, every=2, mode="int8"), sgd(net)
    for step in range(3):
        train(net, optimizer, rank, 1, step)
        local.step()
    if rank == 2:
        setattr(local_updates, place, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    kept, own = copy.deepcopy(local.state_dict()), flat(net)
    with pytest.raises(RankLost) as lost:
        local.step()
    same(local, kept)
    assert torch.equal(own, flat(net))
    Path(folder, str(rank)).write_text(str(lost.value))


@pytest.mark.parametrize("place", first(["average", "all_to_all", "all_gather"], 1))
def test_survivors_name_a_killed_worker_and_keep_their_state(tmp_path, place):
    with pytest.raises(ProcessFailed, match="rank 2 ended without a result"):
        run(dying, 3, str(tmp_path), place)
    for rank in range(2):
        said = (tmp_path / str(rank)).read_text()
        assert re.match(r"rank 2 \(of 3, host .*\) no longer answers: gloo", said), said


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="every is 0"):
        LocalUpdates(Net(), every=0)
    with pytest.raises(ValueError, match="mode is 'int2'; allowed: 'float', 'int8', 'int4'"):
        LocalUpdates(Net(), every=1, mode="int2")
    with pytest.raises(ValueError, match="no process group; start the workers by torchrun"):
        LocalUpdates(Net(), every=1)


class Machine:
    """An agent of torchrun with one worker."""

    def __init__(self, folder: Path, port: int, rounds: int):
        folder.mkdir()
        self.folder = folder
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"]
        command += ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "rounds"]
        command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--max-restarts", "5"]
        command += ["--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1", "--no-python"]
        command += [sys.executable, "-m", "tests.dist.rounds", str(folder), str(rounds)]
        # else agents that come later wait for an address that nobody writes again
        environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (folder / "output").open("w") as output:
            options = {"stdout": output, "stderr": subprocess.STDOUT, "env": environment}
            self.agent = subprocess.Popen(command, **options)

    def rounds(self) -> list[tuple[int, int, int, str]]:
        """(round, workers, process id of the worker, sum of the weights) of each."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [(int(a), int(b), int(c), d) for a, b, c, d in map(str.split, lines)]

    def wait(self, workers: int, after: int, seconds: float = 150) -> None:
        """Wait for three rounds of so many workers, all after round `after`."""
        end = time.monotonic() + seconds
        while sum(one[0] > after and one[1] == workers for one in self.rounds()) < 3:
            said = (self.folder / "output").read_text()[-2000:]
            assert time.monotonic() < end and self.agent.poll() is None, said
            time.sleep(0.2)

    def kill(self) -> None:
        for process in (self.agent.pid, *(one[2] for one in self.rounds()[-1:])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.agent.wait()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_machines_leave_and_join_under_torchrun(tmp_path):
    """The second dies, the first goes on alone, a third one joins and gets its weights."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    machines = [Machine(tmp_path / "first", port, 10**6)]
    first = machines[0]
    try:
        while not answers(port):  # the agent that comes first keeps the store of all
            time.sleep(0.1)
        machines.append(Machine(tmp_path / "second", port, 10**6))
        first.wait(workers=2, after=0)
        machines[1].kill()
        died = first.rounds()[-1][0]
        first.wait(workers=1, after=died - 1)
        alone = first.rounds()[-1][0]
        machines.append(Machine(tmp_path / "third", port, 10**6))
        first.wait(workers=2, after=alone)
    finally:
        for machine in machines:
            machine.kill()
    numbers = [one[0] for one in first.rounds()]
    assert numbers == list(range(1, len(numbers) + 1))
    for other in machines[1:]:
        both = {one[0]: one[3] for one in first.rounds() if one[1] == 2}
        assert other.rounds() and all(both.get(one[0], one[3]) == one[3] for one in other.rounds())
    assert machines[2].rounds()[0][0] > died
    assert "RankLost: rank 1 (of 2, host" in (first.folder / "output").read_text()
