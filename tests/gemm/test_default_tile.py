"""The rule by which products are ended in their kernels where nothing is tuned."""

import pytest
from lsq.gemm.default_tile import BLOCKS, default_tile

from lsq.gemm.configuration import MOST_TILE_ROWS
from lsq.gemm.product_key import TILED, TILED_ALONE
from tests.gemm.operands import asked, matmul
from tests.gemm.tuned import tile


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


@pytest.mark.parametrize(
    ("n", "columns", "k", "split"),
    [
        (512, 512, 8192, 8),
        (1024, 1024, 8192, 2),
        (4096, 1024, 8192, 1),
        (512, 512, 4096, 4),
        (512, 512, 64, 1),
    ],
)
def test_gradients_of_weights_split_many_tokens(n, columns, k, split):
    found = default_tile(asked("project_weight_gradient", n, columns, k))
    assert found.split == split
    width, height = found.blocks(n, columns)
    assert width * height * split >= BLOCKS or found.rows == found.columns == 64


@pytest.mark.parametrize("sm", [None, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("k", [512, 528, 8192, 8208])
def test_a_gpu_with_faster_products_has_short_ones_ended_alone(sm, k):
    found = default_tile(asked("project", 4096, 512, k), sm)
    assert (found is None) == (k > {90: 8192, 100: 512}.get(sm, 2**30))
    assert found is None or (found.instruction == "wgmma") == (sm == 90)


@pytest.mark.parametrize(
    ("m", "n", "rows", "columns"),
    [
        (8192, 1024, 128, 256),
        (8192, 512, 128, 256),
        (4096, 512, 128, 128),
        (2048, 512, 128, 64),
        (1000, 512, 64, 64),
    ],
)
def test_hopper_has_wider_tiles_and_more_stages(m, n, rows, columns):
    assert default_tile(asked("project", m, n, 1024), 90) == tile(
        rows=rows, columns=columns, stages=8, instruction="wgmma"
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


@pytest.mark.parametrize(("sm", "columns"), [(None, 128), (90, 256)])
@pytest.mark.parametrize(("m", "rows"), [(1, 64), (64, 64), (65, 128)])
def test_few_rows_are_not_filled_up_to_128(m, rows, sm, columns):
    found = default_tile(asked("vocabulary_loss", m, 32768, 512), sm)
    assert (found.rows, found.columns) == (rows, columns)
