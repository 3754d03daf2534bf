"""The tuner's side of cuBLASLt, against the emulated library: what is found runs, and what is wrong
is refused.

On a CPU this shows nothing of times on a GPU.
"""

import contextlib
import dataclasses
import shutil

import pytest
import torch

from lsq import gemm
from lsq.gemm import configuration_file
from lsq.gemm.cublaslt import Products
from lsq.gemm.tuner import cublaslt
from lsq.gemm.tuner.cublaslt import CublasBackend, RowChecksums
from lsq.gemm.tuner.search import tune
from lsq.gemm.tuner.trial import Settings, compare, entry_fault
from lsq.native.products import Matmul
from tests.emulator.emulated_cublaslt import emulated
from tests.gemm.operands import asked, codes, matmul
from tests.gemm.tuned import GPU

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SETTINGS = Settings(rounds=3, final_rounds=3, seconds=1e-6)
KEYS = {
    "sums": matmul(k=192),
    "weight gradient": matmul(m=48, n=32, k=80),
    "views": matmul(leading_a=96, leading_b=80, leading_out=64),
    "bfloat16": matmul(k=128, dtype="bfloat16", out="bfloat16", layout="nn"),
    "wide bfloat16": matmul(m=40, k=56, dtype="bfloat16", out="float32", layout="tn"),
    "float32": matmul(m=7, n=24, k=128, dtype="float32", out="float32"),
    "apart": matmul(m=9, n=8, k=24, dtype="bfloat16", out="bfloat16", layout="tn", leading_out=16),
}


@pytest.fixture(scope="module")
def products():
    made = Products(torch.device("cpu"), library=emulated().path)
    yield made
    made.close()


@pytest.mark.parametrize("kind", KEYS)
def test_every_candidate_is_right(products, kind):
    key = KEYS[kind]
    backend = CublasBackend(products, cache=2**14)
    found = backend.candidates(key)
    assert len(found) == len({each.algorithm for each in found}) >= 1
    trial = backend.trial(key)
    for each in found:
        each.check_key(key)
        assert trial.fault(each) is None
    assert trial.seconds(found[0], 3) > 0 and trial.float_seconds(3) > 0
    trial.close()


@pytest.mark.parametrize("kind", ["sums", "bfloat16"])
def test_wrong_results_are_refused(products, monkeypatch, kind):
    backend = CublasBackend(products, cache=0)
    key = KEYS[kind]
    found = backend.candidates(key)
    trial = backend.trial(key)
    run, chosen = Matmul.run, []
    choose = Matmul.choose
    monkeypatch.setattr(
        Matmul, "choose", lambda self, data: chosen.append(data) or choose(self, data)
    )

    def wrong(self, operands, **options):
        run(self, operands, **options)
        if chosen[-1] == found[1].algorithm and trial._own.native is self:
            trial._own.sets[0]["out"][3, 5] += 1

    monkeypatch.setattr(Matmul, "run", wrong)
    outcome = compare(trial, found, SETTINGS)
    assert [each for each, _ in outcome.refused] == [found[1]]
    assert "wrong" in outcome.refused[0][1]
    trial.close()


class FakeGpu:
    """Stands in for what a measurement takes of torch.cuda: a captured run lasts a millisecond."""

    def __init__(self, monkeypatch):
        self.clock, self.capturing, self.captured, self.outside = 0.0, False, 0, 0
        gpu = self

        class Stream(contextlib.nullcontext):
            def __init__(self, device=None):
                super().__init__()

            def wait_stream(self, other):
                pass

        class Graph:
            def capture_begin(self):
                gpu.capturing = True

            def capture_end(self):
                gpu.capturing = False

            def replay(self):
                gpu.clock += gpu.captured

        class Event:
            def __init__(self, enable_timing):
                self.synchronize = lambda: None

            def record(self):
                self.at = gpu.clock

            def elapsed_time(self, end):
                return end.at - self.at

        for name, value in (
            ("Stream", Stream),
            ("CUDAGraph", Graph),
            ("Event", Event),
            ("stream", lambda stream: stream),
            ("current_stream", Stream),
        ):
            monkeypatch.setattr(torch.cuda, name, value)

    def run(self, number):
        if self.capturing:
            self.captured += 1
        else:
            self.outside += 1


def test_the_host_does_not_count_in_measurements(products, monkeypatch):
    backend, gpu = CublasBackend(products), FakeGpu(monkeypatch)
    backend.on_gpu = True
    assert backend.time(gpu.run, 30) == pytest.approx(1e-3)
    assert (gpu.captured, gpu.outside) == (30, 1), "one run before the capture loads what it needs"

    def fails(number):
        if gpu.capturing:
            raise RuntimeError("no such algorithm")

    with pytest.raises(RuntimeError, match="no such algorithm"):
        backend.time(fails, 2)
    assert not gpu.capturing


def test_algorithms_that_do_not_run_are_refused_with_the_reason(products):
    backend = CublasBackend(products, cache=0)
    trial = backend.trial(KEYS["sums"])
    emulated().fail("Matmul", 13)
    assert "int8 [41,192] x [48,192]" in trial.fault(backend.candidates(KEYS["sums"])[0])
    other = backend.candidates(KEYS["bfloat16"])[0]
    assert "INVALID_VALUE" in trial.fault(other)
    good = backend.candidates(KEYS["sums"])[0]
    lying = dataclasses.replace(good, workspace_bytes=99)
    assert trial.fault(lying).startswith("workspace_bytes is 99 in the file")
    trial.close()


@pytest.mark.parametrize("key", [matmul(k=60), matmul(layout="nn"), asked("project", 41, 48, 60)])
def test_products_that_cublaslt_has_not(products, key):
    backend = CublasBackend(products)
    for ask in (backend.candidates, backend.trial):
        with pytest.raises(ValueError, match="int8 product"):
            ask(key)


def test_tuning_and_using_what_was_tuned(products, tmp_path):
    path = tmp_path / "gpu.json"
    backend = CublasBackend(products, cache=2**14)
    summary = tune(backend.trial, list(KEYS.values()), path, GPU, settings=SETTINGS)
    assert len(summary.entries) == len(KEYS) and not summary.failed and not summary.refused
    for entry in configuration_file.read(path).entries:
        assert products.fault(entry.key, entry.configuration) is None
        assert entry_fault(entry, backend.trial) is None


@pytest.mark.parametrize("m", [1, 7, 41])
@pytest.mark.parametrize("n, k", [(16, 16), (48, 7), (1, 2048)])
@pytest.mark.parametrize("elements", [1, 100, 2**18])
def test_right_sums_pass(monkeypatch, m, n, k, elements):
    monkeypatch.setattr(cublaslt, "_ELEMENTS", elements)
    for a, b in [(codes(m, k), codes(n, k)), (codes(k, m).t(), codes(k, n).t())]:
        sums = gemm.reference(a, b)
        assert RowChecksums(a, b).first_wrong_row(sums) is None


@pytest.mark.parametrize("change", [1, -1, 2**16, 2**30, -(2**31)])
def test_any_wrong_sum_is_found(change):
    a, b = codes(9, 64), codes(20, 64)
    checked, sums = RowChecksums(a, b), gemm.reference(a, b)
    for row in range(9):
        for column in range(20):
            wrong = sums.clone()
            wrong[row, column] = (int(wrong[row, column]) + change + 2**31) % 2**32 - 2**31
            assert checked.first_wrong_row(wrong) == row
    for exchanged, row in ((sums.flip(1), 0), (sums.flip(0), 0), (sums[[*range(8), 7]], 8)):
        assert checked.first_wrong_row(exchanged) == row
