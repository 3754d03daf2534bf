"""compress_gradients under DDP: its contract in every mode, what it says and what it refuses."""

import logging
import random
import re
import time
from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lsq.dist import GradientConfig, compress_gradients, hooks, roll_call, trial
from tests.dist.net import Net, Uneven, batch, config, exact_mean, flat_gradients, pieces
from tests.dist.processes import run
from tests.sampling import first

BOUND = {"int8": 0.02, "int8_hier": 0.02, "lean": 0.3, "lean5": 0.2}
BOUND |= {"gcq": 0.4, "bf16": 0.01, "fp16": 0.002}
"""Largest relative error of a mean in these tests, whose gradients are small and uneven: many are
zero."""


def jitter(compression, rank: int) -> None:
    """Make a worker's exchanges, and the hook itself, start late by random times."""
    chance = random.Random(rank)
    for lane in compression._lanes:

        def late(task, submit=lane.executor.submit):
            time.sleep(chance.random() * 0.004)
            return submit(lambda: (time.sleep(chance.random() * 0.004), task())[1])

        lane.executor.submit = late


SCENARIOS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def means(rank: int, modes: list[str]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(what, mean through the hook, exact mean) for each mode, way of using DDP and step."""
    results = []
    for mode in modes:
        for scenario, options in SCENARIOS.items():
            net = Net()
            model = DistributedDataParallel(net, bucket_cap_mb=0.001, **options)
            jitter(compress_gradients(model, config(mode)), rank)
            use_spare = scenario != "unused" or rank % 2 == 0
            for step in range(3):
                model.zero_grad()
                model(batch(rank, step), use_spare).square().sum().backward()
                exact = exact_mean(net, [batch(rank, step)], use_spare=use_spare)
                results.append((f"{mode}, {scenario}, step {step}", flat_gradients(net), exact))
    return results


@pytest.mark.parametrize(
    "modes", first([["int8_hier", "lean", "fp16"], ["int8", "gcq", "bf16", "lean5"]], 1)
)
def test_every_worker_gets_the_same_mean_in_every_mode(modes):
    results = run(means, 4, modes)
    for number, (what, found, exact) in enumerate(results[0]):
        assert all(torch.equal(found, other[number][1]) for other in results[1:]), (
            f"{what}: workers differ"
        )
        error = (found - exact).norm() / exact.norm()
        assert 0 < error < BOUND[what.split(",")[0]], f"{what}: relative error {error:.4f}"


def uneven_means(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Means of the second of two steps, before which DDP puts parameters into other buckets."""
    found = {}
    for mode in ("int8", "int8_hier", "lean", "gcq"):
        net = Uneven()
        model = DistributedDataParallel(net, bucket_cap_mb=0.03)
        compress_gradients(model, config(mode))
        for step in range(2):
            net.zero_grad()
            model(pieces(10 * rank + step)).backward()
        found[mode] = {name: one.grad for name, one in net.named_parameters()}
    return found


def test_gradients_of_small_tensors_are_not_rounded():
    """Those of 15 values are as exact as floats; those of 16 are rounded as all others."""
    results = run(uneven_means, 4)
    mean = torch.stack([pieces(10 * rank + 1) for rank in range(4)]).double().mean(0)
    for mode, found in results[0].items():
        for (name, gradient), wanted in zip(found.items(), Uneven.parts(mean), strict=True):
            assert all(torch.equal(gradient, other[mode][name]) for other in results), (
                f"{mode}, {name}: workers differ"
            )
            if name in ("one", "fifteen"):
                torch.testing.assert_close(gradient.double(), wanted * 1e-6, rtol=1e-6, atol=0)
            else:
                assert 1e-4 < (gradient - wanted).norm() / wanted.norm() < BOUND[mode]


def accumulated(rank: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    net = Net()
    model = DistributedDataParallel(net)
    compression = compress_gradients(model, config("int8"))
    exchanged = []
    for lane in compression._lanes:
        lane.submit = lambda *given, submit=lane.submit: (exchanged.append(1), submit(*given))[1]
    with model.no_sync():
        model(batch(rank, 0)).square().sum().backward()
    before = len(exchanged)
    model(batch(rank, 1)).square().sum().backward()
    return flat_gradients(net), exact_mean(net, [batch(rank, 0), batch(rank, 1)]), before


def test_passes_without_synchronisation_are_added_up_and_sent_once():
    (found, exact, before), (other, _, _) = run(accumulated, 2)
    assert before == 0
    assert torch.equal(found, other)
    assert (found - exact).norm() < 0.02 * exact.norm()


def overflows(rank: int, modes: list[str]) -> list[tuple[str, torch.Tensor]]:
    results = []
    for mode in modes:
        for value in (torch.inf, torch.nan):
            net = Net(torch.bfloat16)
            model = DistributedDataParallel(net)
            compress_gradients(model, GradientConfig(mode=mode, node_size=1))
            x = batch(rank, 0).bfloat16()
            loss = model(x).square().sum()
            (loss * (value if rank == 1 else 1.0)).backward()
            results.append((mode, flat_gradients(net)))
    return results


def test_overflow_on_one_worker_shows_on_all():
    for overflow in run(overflows, 2, ["int8", "int8_hier", "lean", "gcq", "fp16", "bf16"]):
        for mode, gradients in overflow:
            assert not gradients.isfinite().all(), mode


def scaled_steps(rank: int, mode: str) -> tuple[list[bool], list[float], torch.Tensor]:
    """(whether each step changed a weight, the loss scale after each, the weights) with overflow on
    one worker."""
    net = Net()
    model = DistributedDataParallel(net)
    compress_gradients(model, config(mode))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    changed, scales = [], []
    for step in range(4):
        before = net.first.weight.detach().clone()
        optimizer.zero_grad()
        too_large = 2.0**40 if rank == 1 and step == 1 else 1.0
        scaler.scale(model(batch(rank, step)).square().mean() * too_large).backward()
        scaler.step(optimizer)
        scaler.update()
        changed.append(not torch.equal(before, net.first.weight))
        scales.append(scaler.get_scale())
    return changed, scales, net.first.weight.detach()


@pytest.mark.parametrize("mode", ["int8", "gcq"])
def test_all_workers_skip_a_step_that_overflows_on_one(mode):
    first, second = run(scaled_steps, 2, mode)
    assert first[0] == second[0] == [True, False, True, True]
    assert first[1] == second[1] == [2.0**100, 2.0**99, 2.0**99, 2.0**99]
    assert torch.equal(first[2], second[2]) and first[2].isfinite().all()


def fails(rank: int) -> list[str]:
    """What backward raises in this step and in the next once an exchange has failed."""
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.001)
    compression = compress_gradients(model, config("int8"))

    def refuse(buffer):
        raise RuntimeError("the cable was cut")

    for lane in compression._lanes:
        lane.average.average = refuse
    messages = []
    for step in range(2):
        try:
            model(batch(rank, step)).sum().backward()
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_a_failed_exchange_ends_the_backward_pass():
    for messages in run(fails, 2):
        assert "the cable was cut" in messages[0] and len(messages) == 2


def beside_another_group(rank: int) -> torch.Tensor:
    distributed.new_group([0, 1])  # PyTorch counts it in the processes 0 and 1 alone
    gradients = []
    for mode in ("int8", "int8_hier"):
        net = Net()
        model = DistributedDataParallel(net)
        compress_gradients(model, config(mode, timeout_s=10))
        model(batch(rank, 0)).square().sum().backward()
        gradients.append(flat_gradients(net))
    return torch.cat(gradients)


def test_processes_may_be_in_different_numbers_of_groups():
    first, *others = run(beside_another_group, 4)
    assert all(torch.equal(first, other) for other in others)


def halves(rank: int) -> tuple[float, bool]:
    """(the mean of the ranks of each half, whether roll calls began)."""
    both = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    net = nn.Linear(1, 1, bias=False)
    model = DistributedDataParallel(net, process_group=both[rank // 2])
    compress_gradients(model, GradientConfig(mode="int8"))
    model(torch.full((1, 1), float(rank))).sum().backward()
    return net.weight.grad.item(), roll_call._current is not None


def test_some_of_the_processes_call_no_roll_of_all():
    found = run(halves, 4)
    assert [mean for mean, _ in found] == pytest.approx([0.5, 0.5, 2.5, 2.5], rel=0.02)
    assert not any(called for _, called in found)


class Hollow(nn.Module):
    """Has a parameter without values, whose dtype gives it a bucket of its own."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, dtype=torch.bfloat16))
        self.some = nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.some * x).sum() + self.nothing.float().sum()


def hollow(rank: int) -> list[torch.Tensor]:
    """Means where worker 0 has a dummy batch, then where all have."""
    found = []
    for mode in ("int8", "gcq"):
        net = Hollow()
        model = DistributedDataParallel(net)
        compress_gradients(model, config(mode))
        for factor in (rank, 0):
            net.zero_grad()
            model(torch.arange(5.0) * factor).backward()
            found.append(net.some.grad.clone())
    return found


def test_buckets_may_be_empty_and_dummy_batches_count_as_zero():
    for found in run(hollow, 2):
        for mean in found[::2]:
            assert torch.allclose(mean, torch.arange(5.0) / 2, atol=0.1), mean
        assert not any(mean.any() for mean in found[1::2])


def said(options: dict) -> tuple[str, list[str]]:
    """(mode that came out, what this process logged)."""
    records, handler = [], logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    hooks.logger.addHandler(handler)
    hooks.logger.setLevel(logging.INFO)
    compression = compress_gradients(DistributedDataParallel(Net()), GradientConfig(**options))
    hooks.logger.removeHandler(handler)
    return compression.mode, records


def nothing_to_compress(rank: int) -> tuple[str, list[str]]:
    return said({"mode": "int8_hier", "node_size": 2})


def test_what_is_not_plain_is_said_once():
    (mode, (text,)), (_, nothing) = run(nothing_to_compress, 2)
    assert mode == "float" and "there is one" in text and nothing == []


def automatic(rank: int, node_size: int) -> tuple[str, list[str], torch.Tensor]:
    """(mode, log, gradients) where exchanges take these times, by rank: all get the slowest."""
    slow = {"float": [0.4, 0.1], "bf16": [0.1, 0.21], "int8": [0, 0.2], "lean": [0.1, 0.15]}
    slow["int8_hier"] = slow["int8"]
    measured = trial.seconds_of

    def seconds_of(ways, group, device, dtype):
        before = torch.get_rng_state()
        found = measured(ways, group, device, dtype)
        assert all(0 < seconds < 30 for seconds in found.values())
        assert torch.equal(torch.get_rng_state(), before)
        return measured(
            {name: lambda _, name=name: time.sleep(slow[name][rank % 2]) for name in ways},
            group,
            device,
            dtype,
        )

    trial.seconds_of = seconds_of
    mode, records = said({"mode": "auto", "node_size": node_size})
    trial.seconds_of = measured
    net = Net()
    model = DistributedDataParallel(net)
    compress_gradients(model, GradientConfig(mode="auto", node_size=node_size))
    model(batch(rank, 0)).square().sum().backward()
    return mode, records, flat_gradients(net)


@pytest.mark.thorough
@pytest.mark.parametrize("workers, node_size", [(2, 1), (4, 2)])
def test_auto_takes_what_is_fastest_and_says_so(workers, node_size):
    first, *others = run(automatic, workers, node_size)
    int8 = "int8" if node_size == 1 else "int8_hier"
    assert first[0] == "lean" and len(first[1]) == 1
    assert re.search(
        rf"auto chose lean: .* 4\d\d\.\d ms by float, 2.*by bf16, 2.*by {int8}, 1.*by lean; a less"
        " exact mode must save 20 %$",
        first[1][0],
    )
    for mode, records, gradients in others:
        assert (mode, records) == ("lean", []) and torch.equal(gradients, first[2])


def of_dtype(rank: int, dtype: torch.dtype) -> tuple[str, set[torch.dtype]]:
    """(mode that came out, dtypes of buckets of the trial)"""
    measured, tried = trial.seconds_of, set()

    def seconds_of(ways, *rest):
        def seen(average, bucket):
            tried.add(bucket.dtype)
            average(bucket)

        return measured({name: partial(seen, one) for name, one in ways.items()}, *rest)

    trial.seconds_of = seconds_of
    model = DistributedDataParallel(Net(dtype))
    return compress_gradients(model, GradientConfig(mode="auto", node_size=1)).mode, tried


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_auto_leaves_gradients_alone_that_have_no_codes(dtype):
    for mode, tried in run(of_dtype, 2, dtype):
        assert mode in ("float", "bf16") and tried == {dtype}


def test_auto_tries_what_gradients_will_be():
    for _, tried in run(of_dtype, 2, torch.bfloat16):
        assert tried == {torch.bfloat16}


def alone(rank: int) -> str:
    model = DistributedDataParallel(Net())
    compression = compress_gradients(model, GradientConfig(mode="int8"))
    model(batch(0, 0)).sum().backward()
    return compression.mode


def test_one_worker_exchanges_nothing():
    assert run(alone, 1) == ["float"]


def mistakes(rank: int) -> list[str]:
    def message(make) -> str:
        try:
            make()
        except (TypeError, ValueError) as error:
            return str(error)
        return "nothing was raised"

    double = DistributedDataParallel(Net(torch.float64))
    hooked = DistributedDataParallel(Net())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    twice = DistributedDataParallel(Net())
    compress_gradients(twice, GradientConfig(mode="bf16"))
    other = DistributedDataParallel(Net())
    found = [
        message(lambda: compress_gradients(Net())),
        message(lambda: compress_gradients(double, GradientConfig(mode="int8"))),
        message(lambda: compress_gradients(hooked, GradientConfig(mode="int8"))),
        message(lambda: compress_gradients(twice, GradientConfig(mode="int8"))),
        message(
            lambda: compress_gradients(other, GradientConfig(mode="int8", timeout_s=64 << rank))
        ),
        message(lambda: compress_gradients(other, GradientConfig(mode="int8_hier", node_size=3))),
    ]
    hooks.LEAN_DEVICES = ("tpu",)
    found.append(message(lambda: compress_gradients(other, GradientConfig(mode="lean"))))
    hooks.BACKENDS["cpu"] = "nccl"
    return [*found, message(lambda: compress_gradients(other, GradientConfig(mode="int8")))]


def test_mistakes_are_named():
    for found in run(mistakes, 2):
        wanted = (
            ["Net", "DistributedDataParallel"],
            ["first.weight", "torch.float64", "mode bf16"],
            ["communication hook already", "--ddp-comm-hook"],
            ["communication hook already", "call compress_gradients once"],
            ["rank 0 has timeout_s=64", "rank 1 has timeout_s=128"],
            ["2 workers", "nodes of 3"],
            ["gradients are on cpu", "mode lean runs on tpu alone", "int8, int8_hier or bf16"],
            ["gradients are on cpu", "gloo", "cpu by nccl"],
        )
        for message, words in zip(found, wanted, strict=True):
            assert all(word in message for word in words), message


def test_gcq_counts_its_workers(caplog):
    topology = hooks.Topology(world_size=17, rank=0, node_size=17)
    assert hooks._mode(GradientConfig(mode="gcq"), topology) == "gcq"
    assert "-7 to 7" in caplog.text
    with pytest.raises(ValueError, match=r"127 // 128 = 0"):
        hooks._mode(GradientConfig(mode="gcq"), hooks.Topology(world_size=128, rank=0, node_size=8))
