"""The rule by which products are ended in their kernels where nothing is tuned."""

import pytest

from lsq.gemm.configuration import MOST_TILE_ROWS
from lsq.gemm.default_tile import BLOCKS, default_tile
from lsq.gemm.product_key import TILED
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
    [(512, 512, 8192, 8), (1024, 1024, 8192, 2), (4096, 1024, 8192, 1), (512, 512, 4096, 4), (512, 512, 64, 1)],
)
def test_gradients_of_weights_split_many_tokens(n, columns, k, split):
    found = default_tile(asked("project_weight_gradient", n, columns, k))
    assert found.split == split
    width, height = found.blocks(n, columns)
    assert width * height * split >= BLOCKS or found.rows == found.columns == 64


@pytest.mark.parametrize("sm", [None, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("k", [512, 528])
def test_a_gpu_with_faster_products_has_short_ones_ended_alone(sm, k):
    found = default_tile(asked("project", 4096, 512, k), sm)
    assert (found is None) == (k > 512 and sm in (90, 100))


@pytest.mark.parametrize("op", TILED)
def test_what_a_rule_gives_runs(op):
    for m, n, k in ((1, 16, 16), (64 * MOST_TILE_ROWS, 16, 16), (8192, 4096, 1024), (48, 80, 130000)):
        found = default_tile(asked(op, m, n, k))
        found.check_key(asked(op, m, n, k))


@pytest.mark.parametrize(
    "key",
    [
        matmul(), asked("vocabulary_loss", 41, 48, 64), asked("project", 41, 40, 64), asked("project", 41, 48, 40),
        asked("project", 64 * MOST_TILE_ROWS + 1, 16, 16),
    ],
)  # fmt: skip
def test_what_kernels_do_not_end_is_left_to_cublaslt(key):
    assert default_tile(key) is None
