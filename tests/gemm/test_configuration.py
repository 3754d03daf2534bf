"""Configurations and entries as data: what they refuse; the rule for untuned products."""

import dataclasses
import math

import pytest

from lsq.gemm.configuration import MOST_TILE_ROWS, default_tile
from lsq.gemm.operations import TILED, TILED_ALONE
from tests.gemm.operands import asked, matmul
from tests.gemm.tuned import TIMES, cublas, cublas_entry, entry, key, tile


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": b"12"}, "algorithm is 2 bytes; it must be 64 bytes: tune again"),
        ({"algorithm": "12"}, "algorithm is '12'; it must be 64 bytes"),
        ({"workspace_bytes": -1}, "workspace_bytes is -1; it must"),
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
            "stages is 2; it must be a whole number from 3 to 5",
        ),
        (
            {"instruction": "wgmma", "rows": 128, "columns": 256},
            "columns is 256; with 128 rows wgmma has at most 128: tune again",
        ),
        (
            {"instruction": "wgmma", "columns": 256, "stages": 4},
            "stages is 4; shared memory holds at most 3 of 64 x 256: tune again",
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
    wide = tile(rows=128, columns=128, instruction="wgmma")
    assert str(wide) == "tiles of 128 x 128 by wgmma, 3 stages"
    assert (wide.warps, tile().warps) == ((4, 1), (2, 2))
    assert wide.shared_bytes == 3 * 256 * 128 + 2 * (4 * 8 * (128 + 8) * 4 + 36 * 128)
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


@pytest.mark.parametrize(
    ("m", "n", "wanted"),
    [
        (8192, 1024, tile(rows=128, columns=128)),
        (2048, 1024, tile(rows=128, columns=128)),
        (2047, 512, tile(rows=128, columns=64, stages=4)),
        (1000, 512, tile(stages=4)),
        (5, 64, tile(stages=4)),
    ],
)
def test_tiles_become_smaller_until_they_fill_a_gpu(m, n, wanted):
    assert default_tile(asked("project", m, n, 512)) == wanted


@pytest.mark.parametrize(("multiprocessors", "columns"), [(108, 128), (144, 128), (160, 64)])
def test_tiles_leave_few_multiprocessors_alone(multiprocessors, columns):
    found = default_tile(asked("project", 2048, 1024, 512), multiprocessors=multiprocessors)
    assert found.blocks(2048, 1024) == (1024 // columns, 16)


@pytest.mark.parametrize(
    ("n", "columns", "k", "multiprocessors", "split"),
    [
        (512, 512, 8192, 128, 8),
        (512, 512, 8192, 108, 6),
        (1024, 1024, 8192, 128, 2),
        (1024, 1024, 8192, 108, 5),
        (4096, 1024, 8192, 128, 1),
        (4096, 1024, 8192, 108, 2),
        (4096, 4096, 8192, 108, 1),
        (512, 512, 4096, 128, 4),
        (512, 512, 64, 128, 1),
    ],
)
def test_gradients_of_weights_split_many_tokens(n, columns, k, multiprocessors, split):
    found = default_tile(
        asked("project_weight_gradient", n, columns, k), multiprocessors=multiprocessors
    )
    assert found.split == split
    tiles = math.prod(found.blocks(n, columns))
    if (found.rows, found.columns) != (64, 64):
        assert tiles * min(8, k // 1024) >= 7 / 8 * multiprocessors
    turns, whole = (-(-tiles * parts // multiprocessors) for parts in (split, 1))
    assert turns / split <= whole


@pytest.mark.parametrize("sm", [None, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("k", [512, 528, 1024, 1040])
def test_a_gpu_with_faster_products_has_short_ones_ended_alone(sm, k):
    found = default_tile(asked("project", 4096, 512, k), sm)
    assert (found is None) == (k > {90: 4096, 100: 512}.get(sm, 2**30))
    assert found is None or (found.instruction == "wgmma") == (sm == 90)


@pytest.mark.parametrize(
    ("m", "n", "rows", "columns"),
    [
        (8192, 1024, 128, 128),
        (4096, 512, 128, 128),
        (2048, 512, 128, 64),
        (1000, 512, 64, 64),
    ],
)
def test_hopper_has_more_stages(m, n, rows, columns):
    assert default_tile(asked("project", m, n, 1024), 90) == tile(
        rows=rows, columns=columns, stages=5, instruction="wgmma"
    )


@pytest.mark.parametrize("sm", [None, 80, 90, 100])
@pytest.mark.parametrize("op", TILED_ALONE)
def test_logits_are_made_by_tiles_everywhere(op, sm):
    found = default_tile(asked(op, 8192, 32768, 1024), sm)
    assert (
        found.rows == 128
        and found.split == 1
        and found.instruction == ("wgmma" if sm == 90 else "mma")
    )


@pytest.mark.parametrize("op", TILED)
def test_what_a_rule_gives_runs(op):
    for m, n, k in (
        (1, 16, 16),
        (64 * MOST_TILE_ROWS, 16, 16),
        (8192, 4096, 1024),
        (48, 80, 130000),
    ):
        found = default_tile(asked(op, m, n, k))
        found.check_key(asked(op, m, n, k))


@pytest.mark.parametrize(
    "key",
    [
        matmul(),
        asked("project", 41, 40, 64),
        asked("project", 41, 48, 40),
        asked("project", 64 * MOST_TILE_ROWS + 1, 16, 16),
    ],
)
def test_what_kernels_do_not_end_is_left_to_cublaslt(key):
    assert default_tile(key) is None


@pytest.mark.parametrize("sm", [None, 90])
@pytest.mark.parametrize(("m", "rows"), [(1, 64), (64, 64), (65, 128)])
def test_few_rows_are_not_filled_up_to_128(m, rows, sm):
    found = default_tile(asked("vocabulary_loss", m, 32768, 512), sm)
    assert (found.rows, found.columns) == (rows, 128)


def test_gain_and_text():
    assert entry().gain == pytest.approx(1.25)
    assert str(cublas()) == "cuBLASLt by 000102030405060708090a0b0c0d0e0f..., 1024 bytes"
