"""compress_gradients: what it makes of a configuration, what it says and what it refuses."""

import logging

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lsq.dist import GradientConfig, compress_gradients, hooks
from tests.dist.net import Net, batch
from tests.dist.processes import run


def messages_of_modes(rank: int) -> list[tuple[str, list[str]]]:
    """(mode that came out, rank's log) for configurations that need a word."""
    results = []
    for options in (
        {"mode": "auto"},
        {"mode": "auto", "node_size": 1},
        {"mode": "int8_hier", "node_size": 2},
    ):
        records = []
        handler = logging.Handler()
        handler.emit = lambda record, records=records: records.append(record.getMessage())
        hooks.logger.addHandler(handler)
        hooks.logger.setLevel(logging.INFO)
        compression = compress_gradients(DistributedDataParallel(Net()), GradientConfig(**options))
        hooks.logger.removeHandler(handler)
        results.append((compression.mode, records))
    return results


def test_what_is_not_plain_is_said_once():
    first, second = run(messages_of_modes, 2)
    assert [mode for mode, _ in first] == ["bf16", "int8_hier", "float"]
    assert ["auto chose bf16" in first[0][1][0], "auto chose int8_hier" in first[1][1][0]] == [
        True,
        True,
    ]
    assert "there is one" in first[2][1][0]
    assert [len(said) for _, said in first] == [1, 1, 1]
    assert all(said == [] for _, said in second)


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
    hooks.BACKENDS["cpu"] = "nccl"
    return [*found, message(lambda: compress_gradients(other, GradientConfig(mode="int8")))]


def test_mistakes_are_named():
    for found in run(mistakes, 2):
        wanted = (
            ["Net", "DistributedDataParallel"],
            ["first.weight", "torch.float64", "mode bf16"],
            ["communication hook already", "--ddp-comm-hook"],
            ["already", "once"],
            ["rank 0 has timeout_s=64", "rank 1 has timeout_s=128"],
            ["2 workers", "nodes of 3"],
            ["gradients are on cpu", "gloo", "cpu by nccl"],
        )
        for message, words in zip(found, wanted, strict=True):
            assert all(word in message for word in words), message


def many_workers(rank: int) -> str:
    compress_gradients(DistributedDataParallel(Net()), GradientConfig(mode="gcq"))
    return "went through"


def test_gcq_counts_its_workers(monkeypatch, caplog):
    topology = hooks.Topology(world_size=17, rank=0, node_size=17)
    assert hooks._mode(GradientConfig(mode="gcq"), topology) == "gcq"
    assert "-7 to 7" in caplog.text
    with pytest.raises(ValueError, match=r"127 // 128 = 0"):
        hooks._mode(GradientConfig(mode="gcq"), hooks.Topology(world_size=128, rank=0, node_size=8))
    assert run(many_workers, 2) == ["went through"] * 2
