"""The CPU's candidates are sane, and its trials find what is wrong.

Nothing is timed for its own sake.
"""

import pytest

from lsq.gemm import cpu_product
from lsq.gemm.configuration import CpuConfiguration
from lsq.gemm.cpu_product import scratch_bytes
from lsq.gemm.product_key import REQUESTS
from lsq.gemm.tuner import cpu
from lsq.gemm.tuner.cpu import CpuTrial, candidates, last_level_cache
from lsq.gemm.tuner.trial import Settings, compare
from lsq.native import loader, tiles
from tests.gemm.operands import asked, matmul


@pytest.mark.parametrize("op", REQUESTS)
@pytest.mark.parametrize(
    "m, n, k", [(1, 16, 16), (20, 1024, 4096), (3000, 48, 64), (4096, 32000, 512)]
)
def test_candidates(op, m, n, k):
    key = asked(op, m, n, k)
    found = candidates(key)
    assert found[0] == CpuConfiguration.default(key)
    assert len(found) == len(set(found)) <= 50
    for each in found:
        each.check_key(key)
        default = scratch_bytes(key, found[0])
        assert scratch_bytes(key, each) <= max(default, cpu.MOST_SCRATCH)


def test_products_that_the_cpu_does_not_choose_for_are_refused():
    for wrong in (matmul(), matmul(dtype="bfloat16", out="bfloat16")):
        with pytest.raises(
            ValueError, match="kind is 'cpu', which multiplies for its operations alone, not matmul"
        ):
            candidates(wrong)


@pytest.mark.parametrize("op", REQUESTS)
def test_every_candidate_is_right(op):
    key = asked(op, 70, 48, 112)
    trial = CpuTrial(key, cache=2**14)
    for each in candidates(key):
        assert trial.fault(each) is None
        assert trial.seconds(each, 2) > 0
    assert trial.float_seconds(2) > 0
    trial.close()


def test_wrong_results_are_found(monkeypatch):
    key = asked("project", 70, 48, 112)
    trial = CpuTrial(key, cache=0)

    def wrong(a, b, *, out):
        out.copy_((a.float() @ b.float().t()).int())
        if a.shape[1] == 112 and not a.is_contiguous():
            out[3, 5] += 1
        return out

    monkeypatch.setattr(cpu_product, "int8_product", wrong)
    assert trial.fault(CpuConfiguration(rows=32)) is None
    assert (
        trial.fault(CpuConfiguration(rows=0, a_layout="padded")) == "row 3 of the result is wrong"
    )
    found = compare(trial, candidates(key), Settings(rounds=3, final_rounds=3, seconds=1e-6))
    assert {each.a_layout for each, _ in found.refused} == {
        "padded"
    } and found.configuration.a_layout == "as_is"


def test_wrong_tiles_are_found(monkeypatch):
    trial, call = CpuTrial(asked("project", 70, 48, 112), cache=0), loader.call

    def wrong(name, *arguments):
        call(name, *arguments)
        if name == "lsq_multiply_block":
            arguments[-1][3, 5] += 1

    monkeypatch.setattr(loader, "call", wrong)
    for kernel in tiles.usable():
        assert trial.fault(CpuConfiguration(kernel=kernel)) == "row 3 of the result is wrong"


def test_operands_exceed_the_cache():
    key = asked("project", 64, 64, 64)
    for cache in (0, 10_000, 10**6):
        trial = CpuTrial(key, cache=cache)
        sizes = [a.nbytes + b.nbytes + out.nbytes for a, b, out in trial._sets]
        assert sum(sizes) > 2 * cache and sum(sizes[1:]) <= 2 * cache + sizes[0]
        assert len({tensor.data_ptr() for each in trial._sets for tensor in each}) == 3 * len(sizes)


def test_the_sums_of_the_operands_are_large():
    """Instructions that saturate would show."""
    trial = CpuTrial(asked("project", 40, 32, 2000), cache=0)
    a, b, _ = trial._sets[0]
    sums = a.double() @ b.double().t()
    assert sums.abs().max() > 2**24


def test_last_level_cache(tmp_path):
    for name, size in [("index0", "48K"), ("index3", "32M"), ("index4", "odd")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(size + "\n")
    assert last_level_cache(tmp_path) == 32 * 2**20
    assert last_level_cache(tmp_path / "none") == cpu.ASSUMED_CACHE
    assert last_level_cache() >= 2**15
