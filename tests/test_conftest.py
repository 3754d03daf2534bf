"""Failures are told at once, and a process whose GPU is lost ends by the name of the test that lost
it."""

import os
from types import SimpleNamespace

import pytest
import torch

from tests import conftest


def failed(**more) -> SimpleNamespace:
    crash = SimpleNamespace(message="AssertionError: codes differ\nand more")
    longrepr = SimpleNamespace(reprcrash=crash)
    return SimpleNamespace(
        failed=True, nodeid="test_some.py::test_it", **{"longrepr": longrepr, **more}
    )


@pytest.mark.parametrize(
    "report, told",
    [
        (failed(), ["failed: test_some.py::test_it: AssertionError: codes differ"]),
        (
            failed(longrepr="worker 'gw1' crashed"),
            ["failed: test_some.py::test_it: worker 'gw1' crashed"],
        ),
        (SimpleNamespace(failed=False), []),
    ],
)
def test_a_failure_is_told_at_once(report, told):
    lines = []
    reporter = SimpleNamespace(ensure_newline=lambda: None, write_line=lines.append)
    config = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda name: reporter))
    conftest.Failures(config).pytest_runtest_logreport(report)
    assert lines == told


@pytest.mark.parametrize(
    "gpu, fault, ended", [(True, True, [77]), (True, False, []), (False, True, [])]
)
def test_a_lost_gpu_ends_the_process(monkeypatch, gpu, fault, ended):
    def synchronize():
        if fault:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    item = SimpleNamespace(nodeid="test_it", get_closest_marker=lambda name: gpu)
    hook, report = conftest.pytest_runtest_makereport(item), failed()
    next(hook)
    with pytest.raises(StopIteration) as end:
        hook.send(report)
    assert end.value.value is report and ends == ended
