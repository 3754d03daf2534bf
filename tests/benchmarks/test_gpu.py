"""The benchmarks for a GPU, run in the emulator on tiny shapes; what they count, leave out and
keep; and tables of results written by hand."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from argparse import Namespace
from types import SimpleNamespace

import bench_operations
import gpu
import operations
import pytest
import torch

from lsq.native.launch import Product, launch
from lsq.program.declare import Activations, Codes, Floats, In, Indices, Out
from lsq.program.operation import Operation

EMULATE = ["--device", "emulator", "--quick", "--rounds", "1", "--threads", "1"]


@pytest.mark.thorough
def test_operations_in_the_emulator(tmp_path):
    """Kernels alone, products with kernels, and operations outside programs."""
    wanted = ["ResidualNormGradient", "ProjectWeightGradient", "Adam", "PackGradients"]
    written = tmp_path / "figures.json"
    assert bench_operations.main([*EMULATE, "--json", str(written), "--operations", *wanted]) == 0
    figures = json.loads(written.read_text())
    assert not figures["failed"] and not figures["left_out"]
    assert {row["operation"] for row in figures["rows"]} == set(wanted)
    for row in figures["rows"]:
        assert row["operation_microseconds"] > 0
        assert (row["kernels_microseconds"] is None) == (row["ratio"] is None)
        assert row["ratio"] is None or row["megabytes"] > 0
    packed = [row["megabytes"] for row in figures["rows"] if row["operation"] == "PackGradients"]
    values, message = 64 * 48, 8 * 400  # of float32, then of bfloat16
    moved = [factor * values + message for factor in (4, 2)]
    assert packed == pytest.approx([1e-6 * count for count in moved])


def test_an_operation_that_nothing_runs_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench_operations.main([*EMULATE, "--operations", "Adam", "Eve"])
    assert "nothing runs Eve; operations are Adam," in capsys.readouterr().err


class Something(Operation):
    """Whose kernels read a product's sums."""

    x: In[Activations] | None
    bias: In[Floats] | None
    codes: In[Codes] | None
    tokens: In[Indices] | None
    y: Out[Activations]

    def limits(self):
        return {"tokens": 99} if self.tokens is not None else {}


def test_moved_bytes_count_what_crosses_the_border_once():
    x, bias, y = torch.ones(4, 16), torch.ones(16), torch.empty(4, 16, dtype=torch.bfloat16)
    sums, partial = torch.ones(4, 16, dtype=torch.int32), torch.ones(7)
    codes, weight = torch.ones(4, 16, dtype=torch.int8), torch.ones(16, 16, dtype=torch.int8)
    operation = Something(x=x, bias=bias, codes=codes, y=y)
    entries = [
        Product(a=codes, b=weight, out=sums),
        launch("a.cu", "first", operation, sums, partial, grid=1),
        launch("a.cu", "second", operation, partial, grid=1),
        launch("sums.cu", "lsq_finish_sums", partial, torch.ones(99), grid=1),
    ]
    moved = 4 * 16 * 4 + 16 * 4 + 4 * 16 * 2 + 4 * 16 * 4
    assert bench_operations.moved_bytes(operation, entries) == moved
    # a kernel that reads an operand as well
    entries[1] = launch("a.cu", "first", operation, codes, sums, grid=1)
    assert bench_operations.moved_bytes(operation, entries) == moved + 4 * 16
    entries[2] = launch("a.cu", "turn", weight, grid=1)  # one that makes an operand
    assert bench_operations.moved_bytes(operation, entries) == moved + 4 * 16 + 16 * 16
    assert list(bench_operations.parts(entries)) == ["operation", "kernels", "products", "finish"]
    assert list(bench_operations.parts(entries[1:2])) == ["operation", "kernels"]


def test_of_a_table_only_the_rows_that_are_read_count():
    tokens, table, out = torch.ones(4, dtype=torch.int64), torch.ones(99, 8), torch.empty(4, 8)
    operation = Something(x=table, tokens=tokens, y=out)
    entry = launch("embedding.cu", "any", operation, grid=1)
    assert bench_operations.moved_bytes(operation, [entry]) == 4 * 8 + 2 * 4 * 8 * 4


def test_calls_that_do_the_same_work_are_measured_once():
    found = list(operations.calls(("ResidualNorm",), operations.QUICK, 0.1))
    assert len(found) > 1 and len({call.signature for call in found}) == len(found)
    assert {type(tensor).__name__ for call in found for tensor in call.operation.inputs} == {
        "VirtualTensor"
    }


class FakeGpu:
    """Stands in for what gpu.py takes of torch.cuda; each captured call lasts 10 microseconds."""

    def __init__(self, monkeypatch):
        self.clock, self.captured, self.sizes = 0.0, None, []
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self.Graph(self))
        monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self.Event(self))
        cache = SimpleNamespace(L2_cache_size=50_000_000)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cache)
        self.device = SimpleNamespace(
            torch_device=SimpleNamespace(type="cuda"),
            synchronize=lambda: None,
            captures_in_turn=contextlib.nullcontext,
        )

    def call(self):
        if self.captured is not None:
            self.captured.calls += 1

    class Graph:
        def __init__(self, gpu):
            self.gpu, self.calls = gpu, 0

        def __enter__(self):
            self.gpu.captured = self

        def __exit__(self, *_):
            self.gpu.captured = None
            self.gpu.sizes.append(self.calls)

        def replay(self):
            self.gpu.clock += 0.010 * self.calls

    class Event:
        def __init__(self, gpu):
            self.gpu = gpu

        def record(self):
            self.at = self.gpu.clock

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.at - self.at


def test_graphs_hold_enough_calls_and_time_each(monkeypatch):
    fake = FakeGpu(monkeypatch)
    calls = {"few": [fake.call] * 3, "many": [fake.call] * 500}
    timings = gpu.alternate(fake.device, calls, rounds=2)
    assert fake.sizes == [3, 3 * 34, 500]  # 34 passes of 30 microseconds last a millisecond
    assert timings["few"].median == pytest.approx(1e-5)
    assert timings["many"].fastest == pytest.approx(1e-5)


def test_copies_of_operands_exceed_the_cache(monkeypatch):
    device = FakeGpu(monkeypatch).device
    assert gpu.copies(device, moved=10_000_000, held=10_000_000) == 20
    assert gpu.copies(device, moved=10**9, held=10**9) == 2
    assert gpu.copies(device, moved=1, held=10) == gpu.COPIES
    assert gpu.copies(device, moved=1000, held=2**30) == 4


def test_nvidia_smi_is_asked_or_missed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.nvidia_smi().startswith("no answer")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '580.1, 1980, 3201, 1980, 3201, 700.00, 35'\n")
    program.chmod(0o755)
    answer = gpu.nvidia_smi()
    assert (answer["driver_version"], answer["clocks.sm"]) == ("580.1", "1980")
    assert len(answer) == len(gpu.QUERY)


def test_a_survey_goes_on_after_a_failure():
    def fails():
        raise ValueError("too wide")

    survey = gpu.Survey(None)
    survey.measure([("bad", fails), ("good", lambda: iter([{"figure": 1}]))])
    assert survey.rows == [{"figure": 1}]
    assert survey.failed == {"bad": "ValueError: too wide"}


def lose_the_gpu(monkeypatch):
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)


def test_a_survey_keeps_what_it_has_found_whatever_comes(monkeypatch, tmp_path, capsys):
    """Also where the GPU is lost, which ends the process."""
    ends, kernels = [], []
    monkeypatch.setattr(os, "_exit", ends.append)
    options = Namespace(seconds=None, json=tmp_path / "found.json")
    survey = gpu.survey("probe", {"device": "some"}, options, kernels=kernels)

    def fails():
        yield {"figure": 2}
        kernels.append({"kernel": "lsq_rotate"})
        if len(survey.rows) > 2:
            lose_the_gpu(monkeypatch)
        raise RuntimeError("cannot be launched")

    survey.measure([("good", lambda: iter([{"figure": 1}])), ("bad", fails)])
    found = json.loads(options.json.read_text())
    assert found["rows"] == [{"figure": 1}, {"figure": 2}] and found["kernels"] == kernels
    assert not ends
    assert found["failed"] == {"bad": "RuntimeError: cannot be launched"}
    survey.measure([("lost", fails)])
    found = json.loads(options.json.read_text())
    why = "RuntimeError: cannot be launched; lost the GPU: "
    why += "CUDA error: an illegal memory access was encountered"
    assert found["failed"]["lost"] == why and len(found["rows"]) == 3 and ends == [gpu.LOST]
    assert f"lost failed: {why}" in capsys.readouterr().err


def test_a_survey_ends_when_its_time_is_up():
    survey = gpu.Survey(-1.0)
    survey.measure([("late", lambda: iter([{"figure": 1}]))])
    assert survey.left_out == ["late"] and not survey.rows and not survey.failed


def test_a_survey_that_is_asked_to_end_keeps_what_it_has():
    before = signal.getsignal(signal.SIGTERM)
    survey = gpu.Survey(None)
    end = lambda: iter([os.kill(os.getpid(), signal.SIGTERM)])  # noqa: E731
    survey.measure([("first", lambda: iter([{"figure": 1}])), ("second", end), ("third", end)])
    assert survey.rows == [{"figure": 1}]
    assert survey.left_out == ["second", "third"]
    assert signal.getsignal(signal.SIGTERM) == before


def result(benchmark, rows, **more):
    conditions = {"device": "a GPU", "cuda": {"nvrtc": "13.0"}}
    return {"benchmark": benchmark, "conditions": conditions, "rows": rows, **more}


def test_markdown():
    found = result("step", [{"side": "a|b", "ratio": 1.23456}], failed={"x": "why\nmore"})
    conditions = ["## step, a GPU", "", "* device: a GPU", "* cuda: nvrtc 13.0", ""]
    table = ["| side | ratio |", "| --- | --- |", "| a\\|b | 1.235 |", "* failed: x: why"]
    assert gpu.markdown(found).splitlines() == [*conditions, *table]
    assert "No rows." in gpu.markdown(result("step", []))


def test_a_line_that_is_no_result_is_named(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"benchmark": "x"}\n')
    with pytest.raises(ValueError, match="bad.jsonl, line 1"):
        gpu.main([str(file)])
