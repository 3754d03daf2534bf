"""Products with their ends, by cuBLASLt and a kernel or in one kernel, in the emulator: checked,
timed, written."""

import dataclasses
import shutil

import pytest

from lsq.gemm import configuration_file
from lsq.gemm.configuration import CublasConfiguration, TileConfiguration, default_tile
from lsq.gemm.operations import TILED_ALONE
from lsq.gemm.tuner import ended
from lsq.gemm.tuner.cublaslt import CublasBackend
from lsq.gemm.tuner.search import tune
from lsq.gemm.tuner.trial import Settings, entry_fault
from lsq.native.launch_list import LaunchList
from lsq.ops.project_cuda import project_product
from lsq.ops.representatives import OPERATIONS
from lsq.run.cuda import emulated_device
from tests.gemm.operands import asked
from tests.gemm.tuned import GPU, cublas, tile

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
KEY = asked("project", 41, 48, 64)
SETTINGS = Settings(rounds=3, final_rounds=3, confirmations=0, seconds=1e-6)


@pytest.fixture
def backend():
    device = emulated_device()
    return CublasBackend(device.products, device=device, operations=OPERATIONS, cache=0)


@pytest.fixture
def trial(backend):
    found = backend.trial(KEY)
    yield found
    found.close()


def test_the_default_comes_first_then_algorithms_and_tiles(backend, trial, monkeypatch):
    found = trial.candidates()
    assert found[0] == default_tile(KEY) and len(found) == len(set(found))
    assert {each for each in found if isinstance(each, TileConfiguration)} == set(
        ended.tiles(KEY, None)
    )
    assert [each for each in found if isinstance(each, CublasConfiguration)] == backend.candidates(
        KEY
    )
    monkeypatch.setattr(ended, "default_tile", lambda key, sm, multiprocessors: None)
    assert trial.candidates()[0] == backend.candidates(KEY)[0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "op, splits",
    [("project", [1]), ("project_input_gradient", [1]), ("project_weight_gradient", [1, 3])],
)
def test_both_ways_are_right_and_take_time(backend, op, splits):
    trial = backend.trial(asked(op, 48, 48, 208))
    algorithm = next(each for each in trial.candidates() if isinstance(each, CublasConfiguration))
    tiles = [tile(split=split) for split in splits]
    for each in (*tiles, tile(rows=128, columns=128), tile(instruction="wgmma"), algorithm):
        assert trial.fault(each) is None
        assert trial.seconds(each, 2) > 0
    assert trial.float_seconds(1) > 0
    trial.close()


def test_products_over_tokens_are_tried_in_parts():
    few, many = (asked("project_weight_gradient", size, size, 2048) for size in (512, 8192))
    assert {each.split for each in ended.tiles(few, None)} == {1, 2, 4, 8}
    assert {
        each.split for each in ended.tiles(many, None) if (each.rows, each.columns) == (64, 64)
    } == {1}


def test_hopper_tries_both_instructions():
    wide = tile(rows=128, columns=128, stages=5, instruction="wgmma")
    for sm in (None, 80, 90, 100):
        found = ended.tiles(KEY, sm)
        assert (
            (wide in found)
            == ({each.instruction for each in found} == {"mma", "wgmma"})
            == (sm == 90)
        )


def test_operands_are_used_in_turn(backend, monkeypatch):
    backend.cache = 2**14
    trial, run = backend.trial(KEY), []
    original = LaunchList.run
    monkeypatch.setattr(LaunchList, "run", lambda self: run.append(self) or original(self))
    trial.seconds(tile(), 4)
    assert len(set(run)) == min(4, backend.copies(KEY)) > 1
    trial.close()


def test_wrong_results_are_refused(trial, monkeypatch):
    def wrong(operation, chosen):
        """Half of the values along K."""
        made = project_product(operation, chosen)
        return dataclasses.replace(
            made, arguments=tuple(32 if one == 64 else one for one in made.arguments)
        )

    monkeypatch.setattr("lsq.ops.project_cuda.project_product", wrong)
    assert "of its results are wrong" in trial.fault(tile())


def test_what_does_not_run_is_refused_with_the_reason(trial, monkeypatch):
    assert trial.fault(cublas())

    def refused(self):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(LaunchList, "run", refused)
    monkeypatch.setattr(trial, "_exact", lambda: [])
    assert trial.fault(tile()) == "out of shared memory"


@pytest.mark.parametrize("op", TILED_ALONE)
def test_operations_that_are_not_tuned_are_refused(backend, op):
    with pytest.raises(
        ValueError, match=f"op is '{op}', which a GPU makes by tiles of a rule alone: leave it out"
    ):
        backend.trial(asked(op, 41, 48, 64))


def test_the_best_of_both_is_written(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(
        ended.EndedTrial, "seconds", lambda self, each, repeats: 2.0 + few.index(each) / 100
    )
    few = [tile(), tile(stages=2), backend.candidates(KEY)[0]]
    monkeypatch.setattr(ended.EndedTrial, "candidates", lambda self: few)
    summary = tune(backend.trial, [KEY], tmp_path / "gpu.json", GPU, settings=SETTINGS)
    assert not summary.failed and not summary.refused
    (entry,) = configuration_file.read(tmp_path / "gpu.json").entries
    assert entry.key == KEY and entry.configuration == few[0] and entry.times.other == 2.02e6
    assert entry_fault(entry, backend.trial) is None
