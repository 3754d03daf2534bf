"""Configurations and entries as data: what they refuse."""

import dataclasses
import datetime

import pytest

from lsq.gemm.configuration import CpuConfiguration, now
from lsq.gemm.product_key import TILED_ALONE
from lsq.native import tiles
from tests.gemm.tuned import TIMES, cublas, cublas_entry, entry, key, rows, tile


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "mkl"}, "kernel is 'mkl'; allowed: 'plain', 'avx_vnni'"),
        ({"rows": -1}, "rows is -1; it must be a whole number from 0"),
        ({"rows": 48}, "rows is 48; tiles make multiples of 32 rows at a time: use one"),
    ],
)
def test_no_such_cpu_configuration(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        CpuConfiguration(**{"kernel": "plain"} | changes)


def test_cpus_multiply_for_operations_alone():
    with pytest.raises(ValueError, match="^configuration.kernel is of a CPU, .*, not matmul 64 x"):
        entry(op="matmul")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": b"12"}, "algorithm is 2 bytes; it must be 64 bytes: tune again"),
        ({"algorithm": "12"}, "algorithm is '12'; it must be 64 bytes"),
        ({"workspace_bytes": -1}, "workspace_bytes is -1; it must"),
        ({"tile": 2**32}, "tile is 4294967296; it must"),
    ],
)
def test_no_such_algorithm(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        cublas(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 96}, "rows is 96; allowed: 64, 128"),
        ({"columns": 64.0}, "columns is 64.0; allowed"),
        ({"stages": 1}, "stages is 1; it must be a whole number from 2 to 8"),
        ({"split": 0}, "split is 0; it must"),
        ({"columns": 256}, "columns is 256; allowed: 64, 128$"),
        ({"instruction": "dp4a"}, "instruction is 'dp4a'; allowed: 'mma', 'wgmma'"),
        (
            {"instruction": "wgmma", "stages": 2},
            "stages is 2; it must be a whole number from 3 to 8",
        ),
        ({"instruction": "wgmma", "rows": 256}, "rows is 256; allowed: 64, 128"),
    ],
)
def test_no_such_tile(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        tile(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"op": "vocabulary_loss"},
            "rows is of a tile, which ends products of project, .*, not vocabulary_loss",
        ),
        ({"op": "matmul"}, "rows is of a tile"),
        ({"k": 40}, "rows is of a tile, and k is 40, no multiple of 16"),
        ({"m": 2**23}, "rows is 64, of which 8388608 are more than 65535 tiles"),
        ({"configuration": tile(split=2)}, "split is 2; of project it is 1"),
    ],
)
def test_an_entry_whose_tile_cannot_run(changes, message):
    with pytest.raises(ValueError, match=f"^configuration.{message}"):
        entry(**{"configuration": tile()} | changes)


def test_a_tile():
    assert tile(rows=128).shared_bytes == 3 * (128 + 64) * 64
    assert tile(rows=128).blocks(257, 80) == (2, 3) and tile().blocks(0, 64) == (1, 1)
    assert str(tile(split=4)) == "tiles of 64 x 64, 3 stages, K in 4 parts"
    wide = tile(rows=128, columns=256, instruction="wgmma")
    assert str(wide) == "tiles of 128 x 256 by wgmma, 3 stages" and (wide.warps, tile().warps) == (
        (8, 1),
        (2, 2),
    )
    assert entry(op="project_weight_gradient", configuration=tile(split=4)).configuration.split == 4


def test_cublaslt_multiplies_int8_in_one_layout():
    with pytest.raises(
        ValueError, match='^configuration.algorithm is of cuBLASLt, which multiplies int8 as "nt"'
    ):
        cublas_entry(layout="nn")


@pytest.mark.parametrize("op", TILED_ALONE)
def test_cublaslt_makes_no_logits_of_codes(op):
    with pytest.raises(
        ValueError,
        match=f"^configuration.algorithm is of cuBLASLt, which has no part in {op}: tune",
    ):
        cublas_entry(op=op)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"key": key(1000)},
            "key is project 1000 x .* only multiples of 32 have entries: use project 1024 x",
        ),
        ({"spread": float("nan")}, "spread is nan; it must be a finite number"),
        ({"spread": -0.1}, "spread is -0.1; it must"),
        (
            {"date": "2026-02-30T00:00:00Z"},
            "date is '2026-02-30T00:00:00Z'; it must be a time in UTC like",
        ),
        ({"date": "2026-01-31 23:59:59"}, "date is "),
        ({"date": "٢026-01-31T23:59:59Z"}, "date is "),
        ({"date": 20260131}, "date is 20260131"),
    ],
)
def test_no_such_entry(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(entry(), **changes)


@pytest.mark.parametrize("name", ["chosen", "default", "float", "other"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), 1e13, "1", None, True])
def test_no_such_time(name, value):
    if name == "other" and value is None:
        assert TIMES.other is None
        return
    with pytest.raises(ValueError, match=f"^{name} is "):
        dataclasses.replace(TIMES, **{name: value})


def test_gain_and_text():
    assert entry().gain == pytest.approx(1.25)
    assert str(rows(96)) == "plain, 96 rows at a time"
    assert str(rows(0, "amx")) == "amx, as many rows as suit the caches"
    assert "tile 20" in str(cublas()) and "1024 bytes" in str(cublas())


def test_the_rule_takes_the_fastest_instructions(monkeypatch):
    for usable, kernel in (((), "plain"), (("plain",), "plain"), (("amx", "plain"), "amx")):
        monkeypatch.setattr(tiles, "usable", lambda usable=usable: usable)
        assert CpuConfiguration.default() == rows(0, kernel)


def test_now():
    then = datetime.datetime.fromisoformat(dataclasses.replace(entry(), date=now()).date)
    assert abs(datetime.datetime.now(datetime.UTC) - then) < datetime.timedelta(minutes=1)
