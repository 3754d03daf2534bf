"""Products through cuBLASLt's interface agree with exact arithmetic, and what does not fit is
refused in words.

The library is the emulated one: on a CPU this shows that descriptors, layouts and rules are right,
not that a GPU runs. Those that run as tuned fall back where the library refuses an entry.
"""

import dataclasses
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch

from lsq.gemm.configuration_file import SearchedFile
from lsq.gemm.cublaslt import WORKSPACE_BYTES, Products, TunedChoice
from lsq.gemm.lookup import Table
from lsq.gemm.operations import TILED
from lsq.gemm.product_key import key_of
from lsq.native.device import aligned_workspace
from tests.emulator.emulated_cublaslt import emulated
from tests.gemm.operands import asked, codes, matmul, product, run
from tests.gemm.tuned import GPU, cublas_entry, file, tile

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
CPU = torch.device("cpu")
ROWS = [1, 7, 41, 341]
FLOATS = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def products():
    made = Products(CPU, library=emulated().path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def workspace():
    return aligned_workspace(WORKSPACE_BYTES, CPU)


def exact(a, b):
    return a.double() @ b.double().transpose(-1, -2)


def int8_operands(m=41, n=48, k=64):
    """Codes, and where their int32 product goes."""
    return codes(m, k), codes(n, k), torch.full((m, n), 5, dtype=torch.int32)


def check_exact(products, workspace, *shape):
    """Run an int8 product, by default of `matmul`'s shape."""
    a, b, out = int8_operands(*shape)
    run(products, product(a, b, out), workspace)
    assert torch.equal(out, exact(a, b).int())


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("n, k", [(16, 16), (48, 112), (512, 64), (32, 2048)])
def test_int8_to_int32_is_exact(products, workspace, m, n, k):
    check_exact(products, workspace, m, n, k)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_float_products_in_every_form(products, workspace, dtype, wide, transpose_a, transpose_b):
    m, n, k = 41, 24, 56
    a = torch.randn((k, m) if transpose_a else (m, k)).to(dtype)
    b = torch.randn((k, n) if transpose_b else (n, k)).to(dtype)
    out = torch.empty(m, n, dtype=torch.float32 if wide else dtype)
    run(
        products,
        product(a, b, out, transpose_a=transpose_a, transpose_b=transpose_b),
        workspace,
    )
    plain = exact(
        a.transpose(-1, -2) if transpose_a else a, b.transpose(-1, -2) if transpose_b else b
    )
    # Sums in double, in another order: a value may round to the other neighbour.
    torch.testing.assert_close(
        out, plain.to(out.dtype), rtol=torch.finfo(out.dtype).eps, atol=1e-12
    )
    assert (out == plain.to(out.dtype)).float().mean() > 0.999


def test_views_with_leading_dimensions(products, workspace):
    whole_a, whole_b, whole_out = (
        codes(41, 96),
        codes(48, 128),
        torch.zeros(41, 80, dtype=torch.int32),
    )
    a, b, out = whole_a[:, 16:80], whole_b[:, :64], whole_out[:, 16:64]
    found = key_of(product(a, b, out))
    assert (found.leading_a, found.leading_b, found.leading_out) == (96, 128, 80)
    run(products, product(a, b, out), workspace)
    assert torch.equal(out, exact(a, b).int())
    assert not whole_out[:, :16].any() and not whole_out[:, 64:].any()


def test_equal_specs_share_a_product_and_runs_look_nothing_up(products, workspace):
    a, b, out = codes(341, 64), codes(48, 64), torch.empty(341, 48, dtype=torch.int32)
    first = products.prepare(product(a, b, out))
    lookups = [
        "MatmulAlgoGetHeuristic",
        "MatmulAlgoCheck",
        "MatmulAlgoInit",
        "MatmulDescCreate",
        "MatrixLayoutCreate",
    ]
    before = [emulated().calls(name) for name in lookups]
    runs = emulated().calls("Matmul")
    for _ in range(5):
        run(products, product(a, b, out), workspace)
    assert [emulated().calls(name) for name in lookups] == before
    assert emulated().calls("Matmul") == runs + 5
    assert products.get(matmul(m=341)) is first


def test_candidates_fit_the_workspace(products):
    found = products.candidates(matmul())
    assert len(found) > 3
    assert all(candidate.workspace_bytes <= products.workspace_bytes for candidate in found)
    assert {len(candidate.algorithm) for candidate in found} == {64}
    small = Products(CPU, library=emulated().path, workspace_bytes=0)
    none = small.candidates(matmul())
    assert none and all(candidate.workspace_bytes == 0 for candidate in none)
    assert len(none) < len(found)


def test_the_algorithm_may_come_from_elsewhere(workspace):
    wishes = []

    def last(_, wanted, found):
        wishes.append(wanted)
        return found[-1]

    products = Products(CPU, library=emulated().path, choose=last)
    chosen = products.get(matmul())
    assert chosen.algorithm == products.candidates(matmul())[-1]
    assert products.get(matmul()) is chosen and wishes == [matmul()]
    check_exact(products, workspace)


def test_no_algorithm_at_all(products):
    emulated().fail("MatmulAlgoGetHeuristic", 15)
    with pytest.raises(
        RuntimeError, match=r"int8 \[5,64\] x \[48,64\]\^T.*CUBLAS_STATUS_NOT_SUPPORTED"
    ):
        products.get(matmul(m=5))
    assert products.get(matmul(m=5)).algorithm.workspace_bytes >= 0


def test_out_of_memory_names_the_shapes(products, workspace):
    a, b, out = int8_operands()
    products.prepare(product(a, b, out))
    emulated().fail("Matmul", 3)
    with pytest.raises(
        RuntimeError,
        match=r"\[41,64\] x \[48,64\]\^T -> int32 \[41,48\].*out of memory: use smaller",
    ):
        run(products, product(a, b, out), workspace)
    run(products, product(a, b, out), workspace)
    assert torch.equal(out, exact(a, b).int())


def test_the_workspace_is_checked(workspace):
    products = Products(CPU, library=emulated().path, choose=lambda _, key, found: found[1])
    a, b, out = int8_operands()
    need = products.prepare(product(a, b, out)).algorithm.workspace_bytes
    assert need > 0
    before = emulated().calls("Matmul")
    for wrong in (workspace[: need - 1], workspace[8:], torch.empty(0, dtype=torch.uint8)):
        with pytest.raises(
            RuntimeError, match=f"INVALID_VALUE.*at least {need} bytes, at a multiple of 256"
        ):
            run(products, product(a, b, out), wrong)
    assert emulated().calls("Matmul") == before
    run(products, product(a, b, out), workspace[:need])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 24}, "k of an int8 product is a multiple of 16, not 24; pad it to 32"),
        ({"n": 50}, "n of an int8 product is a multiple of 4, not 50; pad it to 52"),
        ({"leading_a": 72}, "leading_a .* multiple of 16, not 72"),
        ({"leading_b": 68}, "leading_b .* multiple of 16, not 68"),
        ({"leading_out": 49}, "leading_out .* multiple of 4, not 49"),
        (
            {"layout": "tt"},
            "layout \"nt\", not 'tt': neither transposed; write the transpose first",
        ),
        ({"layout": "nn"}, "layout \"nt\", not 'nn'"),
    ],
)
def test_what_cublaslt_does_not_multiply_is_refused(products, changes, message):
    for ask in (products.get, products.candidates):
        with pytest.raises(ValueError, match=message):
            ask(matmul(**changes))


@pytest.mark.parametrize("op", TILED)
def test_operations_multiply_packed_operands_along_k(products, op):
    key = asked(op, 41, 48, 64)
    assert products.candidates(key) == products.candidates(matmul())
    a, b, out = int8_operands()
    given = dataclasses.replace(product(a, b, out), op=op)
    assert products.prepare(given).key == key
    run(products, given, aligned_workspace(WORKSPACE_BYTES, CPU))
    assert torch.equal(out, (a.double() @ b.double().t()).int())


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


def test_an_entry_decides(tuned, candidates, workspace):
    last = candidates(matmul())[-1]
    assert last != candidates(matmul())[0]
    products, choice = tuned(cublas_entry(last))
    assert products.get(matmul()).algorithm == last
    assert products.get(matmul(m=42)).algorithm == candidates(matmul(m=42))[0]
    assert {use.key.m: use.hit for use in choice.table.uses()} == {41: True, 42: False}
    check_exact(products, workspace)


def test_an_entry_serves_its_own_product_alone(tuned, candidates):
    products, choice = tuned(cublas_entry(candidates(matmul())[-1]))
    others = [matmul(m=42), matmul(leading_a=80), matmul(leading_b=80)]
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


def no_bytes(candidates):
    return dataclasses.replace(candidates(matmul())[0], algorithm=b"\x01" * 64)


def of_floats(candidates):
    return candidates(matmul(dtype="bfloat16", out="float32"))[0]


def lying(candidates):
    good = candidates(matmul())[-1]
    return dataclasses.replace(good, workspace_bytes=good.workspace_bytes + 1)


def hungry(candidates):
    return max(candidates(matmul()), key=lambda candidate: candidate.workspace_bytes)


@pytest.mark.parametrize(
    ("entry_of", "options", "message"),
    [
        (no_bytes, {}, "CUBLAS_STATUS_INVALID_VALUE"),
        (of_floats, {}, "CUBLAS_STATUS"),
        (lying, {}, r"workspace_bytes is \d+ in the file, and its algorithm needs \d+"),
        (hungry, {"workspace_bytes": 16}, "needs a workspace of .* of 16 allowed"),
    ],
)
def test_entries_that_are_refused_are_told_once(
    tuned, candidates, caplog, entry_of, options, message
):
    configuration = entry_of(candidates)
    entries = [cublas_entry(configuration, m=m) for m in (41, 43)]
    products, choice = tuned(*entries, **options)
    first = {m: products.candidates(matmul(m=m))[0] for m in (41, 43)}
    with caplog.at_level(logging.WARNING):
        for m in (41, 43, 41, 43):
            assert products.get(matmul(m=m)).algorithm == first[m]
    assert {use.key.m: use.hit for use in choice.table.uses()} == {41: False, 43: False}
    (record,) = caplog.records
    for words in ("matmul 41 x 48 x 64", "lsq configs verify", message):
        assert re.search(words, record.getMessage())


def test_a_single_row_has_no_stride(products, workspace):
    a = codes(1, 64).as_strided((1, 64), (1, 1))
    out = torch.empty(1, 48, dtype=torch.int32)
    b = codes(48, 64)
    run(products, product(a, b, out), workspace)
    assert torch.equal(out, exact(a, b).int())
