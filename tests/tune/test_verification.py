"""Every entry of a file is checked: by a trial that runs it, or by the library."""

import contextlib
import dataclasses
import shutil

import pytest
import torch

from lsq.gemm.cublaslt import Products
from lsq.tune.verification import cublaslt_check, trial_check, verify
from tests.csrc.emulated_cublaslt import emulated
from tests.gemm.operands import spec
from tests.gemm.test_tuned_cublaslt import configuration_of
from tests.gemm.tuned import GPU, cublas, cublas_entry, entry, file


class Trial:
    """Finds what it is told to find, and notes what it was asked."""

    def __init__(self, found):
        self.found, self.asked, self.closed = found, [], 0

    def __call__(self, key):
        self.asked.append(key)
        return self

    def fault(self, configuration):
        self.asked[-1] = self.asked[-1], configuration
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def close(self):
        self.closed += 1


def test_every_entry_is_run_once():
    trial = Trial(None)
    wanted = file(entry(8), entry(9))
    assert list(verify(wanted, trial_check(trial))) == [(entry(8), None), (entry(9), None)]
    assert trial.asked == [(each.key, each.configuration) for each in wanted.entries] and trial.closed == 2


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("row 3 is wrong", "row 3 is wrong; tune this product again"),
        (RuntimeError("no memory"), "it does not run here (no memory); tune this product again"),
        (ValueError("bad"), "it does not run here (bad); tune this product again"),
    ],
)
def test_faults(found, message):
    trial = Trial(found)
    assert list(verify(file(entry(8)), trial_check(trial))) == [(entry(8), message)]
    assert trial.closed == 1


def test_entries_that_no_memory_holds_are_not_run():
    trial = Trial(None)
    ((_, fault),) = verify(file(entry(2**31 - 32, n=2**31 - 1)), trial_check(trial))
    assert fault.startswith("not run, because its operands and its result take") and not trial.asked


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_library_checks_algorithms():
    with contextlib.closing(Products(torch.device("cpu"), library=emulated().path)) as products:
        good = configuration_of(products.candidates(spec())[-1])
        foreign = products.candidates(spec(dtype=torch.bfloat16, out_dtype=torch.float32))[0]
        wrong = {
            42: dataclasses.replace(good, tile=good.tile + 1),
            43: dataclasses.replace(good, workspace_bytes=good.workspace_bytes + 1),
            44: configuration_of(foreign),
            45: cublas(),
        }
        entries = [cublas_entry(good), *(cublas_entry(each, m=m) for m, each in wrong.items())]
        found = {each.key.m: fault for each, fault in verify(file(*entries, validators=GPU), cublaslt_check(products))}
    assert found[41] is None
    assert found[42].startswith("tile is") and found[42].endswith("; tune this product again")
    assert found[43].startswith("workspace_bytes is")
    assert found[44].startswith("its algorithm is refused") and found[45].startswith("its algorithm is refused")
