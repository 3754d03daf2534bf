"""Products of cuBLASLt that run as tuned, and what happens where the library refuses an entry.

The library is the emulated one.
"""

import dataclasses
import logging
import shutil
from pathlib import Path

import pytest
import torch

from lsq.gemm.configuration_file import SearchedFile
from lsq.gemm.cublaslt import WORKSPACE_BYTES, Products, TunedChoice
from lsq.gemm.lookup import Table
from lsq.native.device import aligned_workspace
from tests.emulator.emulated_cublaslt import emulated
from tests.gemm.operands import asked, codes, matmul, product, run
from tests.gemm.tuned import GPU, cublas_entry, file, tile

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
CPU = torch.device("cpu")


@pytest.fixture
def tuned():
    """tuned(entry, ..., options): products with a table of these entries, and what chooses."""
    made = []

    def tuned(*entries, **options):
        found = SearchedFile(path=Path("file.json"), file=file(*entries), refusal=None)
        choice = TunedChoice(Table(GPU, [found]))
        products = Products(CPU, library=emulated().path, choose=choice, **options)
        made.append(products)
        return products, choice

    yield tuned
    for products in made:
        products.close()


@pytest.fixture
def candidates(tuned):
    """candidates(key): what the library proposes."""
    return tuned()[0].candidates


def test_an_entry_decides(tuned, candidates):
    last = candidates(matmul())[-1]
    assert last != candidates(matmul())[0]
    products, choice = tuned(cublas_entry(last))
    assert products.get(matmul()).algorithm == last
    assert products.get(matmul(m=42)).algorithm == candidates(matmul(m=42))[0]
    assert {use.key.m: use.hit for use in choice.table.uses()} == {41: True, 42: False}
    a, b, out = codes(41, 64), codes(48, 64), torch.empty(41, 48, dtype=torch.int32)
    run(products, product(a, b, out), aligned_workspace(WORKSPACE_BYTES, CPU))
    assert torch.equal(out, (a.double() @ b.double().t()).int())


def test_an_entry_serves_its_own_product_alone(tuned, candidates):
    products, choice = tuned(cublas_entry(candidates(matmul())[-1]))
    others = [matmul(m=42), matmul(leading_a=80), matmul(out="int8", alpha="vector")]
    for other in others:
        assert products.get(other).algorithm == candidates(other)[0]
    assert {use.key: use.hit for use in choice.table.uses()} == dict.fromkeys(others, False)


def test_an_operation_whose_tile_is_not_used_runs_as_proposed(tuned, candidates):
    key = asked("project", 41, 48, 64)
    products, _ = tuned(dataclasses.replace(cublas_entry(), key=key, configuration=tile()))
    assert products.get(key).algorithm == candidates(key)[0]
    last = candidates(key)[-1]
    products, _ = tuned(dataclasses.replace(cublas_entry(last), key=key))
    assert products.get(key).algorithm == last
    assert products.get(asked("project", 40, 48, 64)).algorithm == candidates(matmul(m=40))[0]


def refusals(tuned, entries, caplog, **options):
    """Ask for the products of two entries, twice each, that are refused; the one warning."""
    products, choice = tuned(*entries, **options)
    first = {m: products.candidates(matmul(m=m))[0] for m in (41, 43)}
    with caplog.at_level(logging.WARNING):
        for m in (41, 43, 41, 43):
            assert products.get(matmul(m=m)).algorithm == first[m]
    assert {use.key.m: use.hit for use in choice.table.uses()} == {41: False, 43: False}
    (record,) = caplog.records
    assert (
        "matmul 41 x 48 x 64" in record.getMessage() and "lsq configs verify" in record.getMessage()
    )
    return record.getMessage()


def entries_of(configuration):
    return [cublas_entry(configuration), cublas_entry(configuration, m=43)]


def test_bytes_that_are_no_algorithm(tuned, candidates, caplog):
    good = candidates(matmul())[0]
    broken = dataclasses.replace(good, algorithm=b"\x01" * 64)
    assert "CUBLAS_STATUS_INVALID_VALUE" in refusals(tuned, entries_of(broken), caplog)


def test_an_algorithm_of_another_product(tuned, candidates, caplog):
    floats = candidates(matmul(dtype="bfloat16", out="float32"))[0]
    assert "CUBLAS_STATUS" in refusals(tuned, entries_of(floats), caplog)


def test_an_entry_that_lies(tuned, candidates, caplog):
    good = candidates(matmul())[-1]
    lying = dataclasses.replace(good, split_k=good.split_k + 1)
    message = refusals(tuned, entries_of(lying), caplog)
    assert (
        f"split_k is {good.split_k + 1} in the file, and its algorithm has {good.split_k}"
        in message
    )


def test_too_large_a_workspace(tuned, candidates, caplog):
    hungry = max(candidates(matmul()), key=lambda candidate: candidate.workspace_bytes)
    message = refusals(tuned, entries_of(hungry), caplog, workspace_bytes=16)
    assert "needs a workspace of" in message and "of 16 allowed" in message


def test_fault(tuned, candidates):
    products, algorithm = tuned()[0], candidates(matmul())[0]
    assert products.fault(matmul(), algorithm) is None
    assert "tile is 99 in the file" in products.fault(
        matmul(), dataclasses.replace(algorithm, tile=99)
    )
    larger = dataclasses.replace(algorithm, workspace_bytes=algorithm.workspace_bytes + 1)
    assert "workspace_bytes is" in products.fault(matmul(), larger)
