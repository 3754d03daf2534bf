"""Products of cuBLASLt that run as tuned, and what happens where the library refuses an entry.

The library is the emulated one.
"""

import dataclasses
import logging
import shutil
from pathlib import Path

import pytest
import torch

from lsq.csrc.launch_list import aligned_workspace
from lsq.gemm.configuration import DECODED, CublasConfiguration
from lsq.gemm.cublaslt import WORKSPACE_BYTES
from lsq.gemm.lookup import Table
from lsq.gemm.product_key import ProductKey
from lsq.gemm.search import Found
from lsq.gemm.tuned_cublaslt import decoded_fault, keys_of, spec_of, tuned_products
from lsq.tune import coverage
from tests.csrc.emulated_cublaslt import emulated
from tests.gemm.operands import codes, product, spec
from tests.gemm.tuned import GPU, cublas_entry, file

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
CPU = torch.device("cpu")


def configuration_of(algorithm):
    """An algorithm as an entry holds it."""
    fields = {name: getattr(algorithm, name) for name in DECODED}
    return CublasConfiguration(algorithm=algorithm.data, workspace_bytes=algorithm.workspace_bytes, **fields)


@pytest.fixture
def tuned():
    """tuned(entry, ..., options): products with a table of these entries, and what chooses."""
    made = []

    def tuned(*entries, **options):
        found = Found(path=Path("file.json"), source="user", file=file(*entries, validators=GPU), refusal=None)
        products, choice = tuned_products(CPU, Table(GPU, [found]), library=emulated().path, **options)
        made.append(products)
        return products, choice

    yield tuned
    for products in made:
        products.close()


@pytest.fixture
def candidates(tuned):
    """candidates(spec): what the library proposes."""
    return tuned()[0].candidates


def test_an_entry_decides(tuned, candidates):
    last = candidates(spec())[-1]
    assert last.data != candidates(spec())[0].data
    products, choice = tuned(cublas_entry(configuration_of(last)))
    assert products.get(spec()).algorithm == last
    assert products.get(spec(m=42)).algorithm == candidates(spec(m=42))[0]
    assert {line.key.m: line.hit for line in coverage.of(choice.table).lines} == {41: True, 42: False}
    assert not choice.refused
    a, b, out = codes(41, 64), codes(48, 64), torch.empty(41, 48, dtype=torch.int32)
    products.run(product(a, b, out), aligned_workspace(WORKSPACE_BYTES, CPU))
    assert torch.equal(out, (a.double() @ b.double().t()).int())


def test_the_entry_of_any_operation_will_do(tuned, candidates):
    last = candidates(spec(k=1024))[-1]
    products, choice = tuned(cublas_entry(configuration_of(last), op="linear_weight_gradient", k=1024))
    assert products.get(spec(k=1008)).algorithm.data == last.data
    (line,) = coverage.of(choice.table).lines
    assert line.hit and line.key.op == "linear_weight_gradient"


def test_other_kinds_of_products_run_untuned(tuned, candidates):
    products, choice = tuned(cublas_entry(configuration_of(candidates(spec())[-1])))
    batched = spec(batch=3)
    assert products.get(batched).algorithm == candidates(batched)[0]
    assert not coverage.of(choice.table).lines
    scaled = spec(out_dtype=torch.int8, alpha="vector")
    assert products.get(scaled).algorithm == candidates(scaled)[0]
    (line,) = coverage.of(choice.table).lines
    assert not line.hit and line.key.alpha == "vector"


def refusals(tuned, entries, caplog, **options):
    """Ask for the products of two entries, twice each, that are refused; the one warning."""
    products, choice = tuned(*entries, **options)
    first = {m: products.candidates(spec(m=m))[0] for m in (41, 43)}
    with caplog.at_level(logging.WARNING):
        for m in (41, 43, 41, 43):
            assert products.get(spec(m=m)).algorithm == first[m]
    assert sorted((key.m, count) for key, count in choice.refused.items()) == [(41, 1), (43, 1)]
    assert {line.key.m: line.hit for line in coverage.of(choice.table).lines} == {41: False, 43: False}
    (record,) = caplog.records
    assert "matmul 41 x 48 x 64" in record.getMessage() and "lsq configs verify" in record.getMessage()
    return record.getMessage()


def entries_of(configuration):
    return [cublas_entry(configuration), cublas_entry(configuration, m=43)]


def test_bytes_that_are_no_algorithm(tuned, candidates, caplog):
    good = configuration_of(candidates(spec())[0])
    broken = dataclasses.replace(good, algorithm=b"\x01" * 64)
    assert "CUBLAS_STATUS_INVALID_VALUE" in refusals(tuned, entries_of(broken), caplog)


def test_an_algorithm_of_another_product(tuned, candidates, caplog):
    floats = candidates(spec(dtype=torch.bfloat16, out_dtype=torch.float32))[0]
    assert "CUBLAS_STATUS" in refusals(tuned, entries_of(configuration_of(floats)), caplog)


def test_an_entry_that_lies(tuned, candidates, caplog):
    good = configuration_of(candidates(spec())[-1])
    lying = dataclasses.replace(good, split_k=good.split_k + 1)
    message = refusals(tuned, entries_of(lying), caplog)
    assert f"split_k is {good.split_k + 1} in the file, and its algorithm has {good.split_k}" in message


def test_too_large_a_workspace(tuned, candidates, caplog):
    hungry = max(candidates(spec()), key=lambda candidate: candidate.workspace_bytes)
    message = refusals(tuned, entries_of(configuration_of(hungry)), caplog, workspace_bytes=16)
    assert "needs a workspace of" in message and "of 16 allowed" in message


def test_decoded_fault(candidates):
    algorithm = candidates(spec())[0]
    entry = cublas_entry(configuration_of(algorithm))
    assert decoded_fault(entry, algorithm) is None
    assert "tile is" in decoded_fault(entry, dataclasses.replace(algorithm, tile=99))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"out_dtype": torch.int8, "alpha": "vector"},
        {"dtype": torch.bfloat16, "out_dtype": torch.float32, "alpha": "scalar", "transpose_a": True},
        {"dtype": torch.float32, "out_dtype": torch.float32, "transpose_b": True},
    ],
)
def test_keys_and_specs(changes):
    wanted = spec(**changes)
    keys = keys_of(wanted)
    assert keys[0].op == "matmul" and all(spec_of(key) == wanted for key in keys)
    assert len(keys) == (6 if wanted.dtype == torch.int8 else 1)


def test_no_such_product():
    with pytest.raises(ValueError, match="neither transposed"):
        spec_of(ProductKey(op="matmul", m=16, n=16, k=16, layout="nn"))
