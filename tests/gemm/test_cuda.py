"""Which products lsq's kernels of a GPU make: as its files say, else by shape."""

import pytest

from lsq import gemm
from lsq.gemm import cuda, lookup
from lsq.gemm.configuration import default_tile
from lsq.gemm.lookup import Table
from tests.gemm.operands import asked, matmul
from tests.gemm.tuned import GPU, Machine, cublas, entry, key, tile

SHAPE = "project", 64, 128, 256
"""As tests.gemm.tuned.key has it."""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A device with a GPU."""
    return Machine(monkeypatch, tmp_path)


def uses():
    return {use.key: use.hit for use in lookup.table().uses()}


def test_without_a_gpu_the_shape_decides(machine):
    machine.gpu = None
    assert gemm.cuda_tile(*SHAPE) == default_tile(key()) is not None


def test_untuned_the_shape_and_the_gpu_decide(machine):
    assert gemm.cuda_tile(*SHAPE) == default_tile(key(), 90)
    assert gemm.cuda_tile("project", 64, 128, 16384) is None is default_tile(key(k=16384), 90)
    assert uses() == {key(): False}


def test_an_entry_decides(machine):
    machine.add(machine.user, "gpu", entry(configuration=tile(columns=128)))
    assert gemm.cuda_tile(*SHAPE) == tile(columns=128)
    assert uses() == {key(): True}


def test_an_entry_of_cublaslt_leaves_the_product_to_it_unlisted(machine):
    machine.add(machine.user, "gpu", entry(configuration=cublas()))
    assert gemm.cuda_tile(*SHAPE) is None
    assert not uses()


def test_the_nearest_batch_size_serves(machine):
    machine.add(
        machine.user,
        "gpu",
        entry(configuration=cublas()),
        entry(1024, configuration=tile()),
    )
    assert [gemm.cuda_tile("project", m, 128, 256) for m in (7, 64, 65, 4000)] == [
        None,
        None,
        tile(),
        tile(),
    ]


def test_other_files_are_asked_at_once(machine, tmp_path):
    path = machine.add(tmp_path, "gpu", entry(configuration=tile(stages=5)))
    before = gemm.cuda_tile(*SHAPE)
    lookup.set_files([path])
    assert gemm.cuda_tile(*SHAPE) == tile(stages=5) != before


def test_who_compares_decides_for_a_while(machine):
    with gemm.ended_by(tile(stages=7)):
        with gemm.ended_by(None):
            assert gemm.cuda_tile(*SHAPE) is None
        assert gemm.cuda_tile(*SHAPE) == tile(stages=7)
    assert gemm.cuda_tile(*SHAPE) == default_tile(key(), 90)


def test_what_tiles_alone_make_is_left_to_nothing_else(machine):
    """Logits of codes, whatever GPU it is and whatever is compared, but with another tile."""
    wanted = default_tile(asked("vocabulary_loss", 64, 128, 1024), 90)
    assert gemm.cuda_tile("vocabulary_loss", 64, 128, 1024) == wanted is not None
    with gemm.ended_by(None):
        assert gemm.cuda_tile("vocabulary_loss", 64, 128, 1024) == wanted
    with gemm.ended_by(tile(stages=7)):
        assert gemm.cuda_tile("vocabulary_loss", 64, 128, 1024) == tile(stages=7)
    assert not uses()  # nothing to tune


def test_programs_are_made_again_where_products_are(machine):
    found = [cuda.choices()]
    for tile_of_all in (None, tile(stages=7)):
        with gemm.ended_by(tile_of_all):
            found.append(cuda.choices())
    lookup.set_files([])
    assert len({*found, cuda.choices()}) == 4


def test_no_such_product():
    with pytest.raises(ValueError, match="op is 'conv'; allowed"):
        gemm.cuda_tile("conv", 1, 16, 16)


def test_a_table_of_a_gpu_has_defaults_of_it():
    made = Table(GPU)
    assert made.configuration(key()) == made.use(key()).configuration == default_tile(key(), GPU.sm)
    assert made.configuration(matmul()) is None
