"""`lsq tune`: what is tuned, into which file, and what is said. The GPU is a fake."""

import dataclasses
import os

import pytest

from lsq.commands import tune, tune_registers
from lsq.files.lock import locked_file
from lsq.gemm import configuration_file, registers
from lsq.gemm.tuner.search import Summary
from lsq.gemm.tuner.trial import Settings
from lsq.native import tiles
from tests.gemm.operands import asked
from tests.gemm.tuned import GPU, TIMES, Machine, cublas, cublas_entry, entry, file, key, tile
from tests.gemm.tuner.fakes import FakeBackend

KEYS = [asked("project", 20, 48, 64), asked("project_weight_gradient", 48, 32, 41)]
TINY = (
    "--arch lsq_transformer --vocabulary-size 40 --encoder-layers 1 --decoder-layers 1"
    " --encoder-embed-dim 32 --encoder-ffn-embed-dim 48 --decoder-ffn-embed-dim 48"
    " --share-all-embeddings --encoder-attention-heads 4 --decoder-attention-heads 4"
).split()
TILED = [entry(rows, configuration=tile()) for rows in (64, 32)]
GPU_FILE = file(*TILED, cublas_entry())


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a GPU, whose products all have two ways, of which the second is faster."""
    found = Machine(monkeypatch, tmp_path)
    settings = Settings(rounds=3, final_rounds=3, seconds=1e-6)
    monkeypatch.setattr("lsq.gemm.tuner.search.Settings", lambda: settings)
    found.run = lambda **options: monkeypatch.setattr(
        tune, "gpu_trials", lambda **_: FakeBackend({512: 1.0, 7: 0.5}, **options).trial
    )
    found.run()
    return found


@pytest.fixture
def shapes(tmp_path):
    found = tmp_path / "shapes.csv"
    found.write_text("op,m,n,k\nproject,20,48,64\nproject_weight_gradient,48,32,41\n")
    return found


@pytest.fixture
def lsq_tune(lsq):
    return lambda *options: lsq("tune", *options)


def test_shapes_are_tuned_into_a_file_of_this_device(
    machine, shapes, tmp_path, lsq_tune, monkeypatch
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)  # the bar is for terminals
    output = tmp_path / "more" / "file.json"
    status, printed, shown = lsq_tune("--shapes", shapes, "--output", output)
    assert status == 0 and printed.startswith("to tune    2 products\n")
    assert f"file       {output}\ntuned      2 products\n" in printed
    assert "tuning: 100%" in shown and "2/2" in shown and "times as fast" in shown
    found = configuration_file.read(output)
    assert found.validators == GPU and {each.key for each in found.entries} == set(KEYS)
    status, printed, shown = lsq_tune("--shapes", shapes, "--output", output, "--quiet")
    assert "2 had an entry already; --again" in printed and "to tune" not in printed
    assert (status, shown) == (0, "")
    status, printed, _ = lsq_tune("--shapes", shapes, "--output", output, "--quiet", "--again")
    assert status == 0 and "tuned      2 products" in printed
    shapes.write_text("op,m,n,k\n")  # as of a run whose products are all tuned
    status, printed, _ = lsq_tune("--shapes", shapes, "--output", output, "--quiet")
    assert status == 0 and "tuned      0 products" in printed


def test_the_default_file_is_the_users_and_is_found(machine, shapes, lsq_tune):
    assert lsq_tune("--shapes", shapes, "--quiet")[0] == 0
    (found,) = configuration_file.search(GPU)
    assert found.path == machine.user / configuration_file.file_name(GPU) and found.refusal is None


def test_products_are_listed_without_a_gpu(lsq_tune):
    options = "--max-tokens 1000 --step 512 --sentences 2 --beam 4 --list".split()
    status, printed, _ = lsq_tune(*TINY, *options)
    heading, *lines = printed.splitlines()
    assert status == 0 and heading == "op,m,n,k,dtype,out,layout"
    assert len(lines) == len(set(lines))
    sizes = {int(line.split(",")[1]) for line in lines if line.startswith("project,")}
    assert sizes == {1024, 512, 8, 4}
    assert "project_weight_gradient,48,32,1024,,," in lines
    assert "matmul,48,32,512,float32,float32,tn" in lines
    assert "matmul,48,32,512" not in lsq_tune(*TINY, *options, "--backward", "int8")[1]


def test_the_list_can_be_tuned(machine, tmp_path, lsq_tune):
    status, printed, _ = lsq_tune(*TINY, "--max-tokens", "32", "--sentences", "1", "--list")
    listed, output = tmp_path / "list.csv", tmp_path / "file.json"
    listed.write_text(printed)
    given = ["--shapes", listed, "--output", output, "--quiet", "--seconds", "60"]
    assert (status, lsq_tune(*given)[0]) == (0, 0)
    assert len(configuration_file.read(output).entries) == len(printed.splitlines()) - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say what to tune: --arch NAME or --shapes FILE"),
        (["--shapes", "x.csv", "--arch", "y"], "say what to tune: --arch NAME or --shapes FILE"),
        (["--shapes", "x.csv", "--colour", "red"], "unrecognized arguments: --colour "),
        ([*TINY, "--colour", "red"], "unrecognized arguments: --colour "),
        (["--shapes", "x.csv", "--seconds", "0"], "'0' is not a number of seconds above 0"),
        (["--shapes", "x.csv", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["--shapes", "missing.csv"], "missing.csv is not there; check the path"),
        ([*TINY, "--step", "100"], "step is 100"),
        (["--arch", "transformer"], "arch is 'transformer'; allowed: lsq_transformer,"),
        (["--shapes", "x.csv", "--device", "cpu"], "--shapes is for GPUs; with --device cpu leave"),
        (["--seconds", "9", "--device", "cpu"], "--seconds is for GPUs; with --device cpu leave"),
        ([*TINY, "--max-source-positions", "-1"], "--max-source-positions is -1; it must be from"),
    ],
)
def test_mistakes_are_told_in_one_line(machine, tmp_path, monkeypatch, lsq_tune, options, message):
    monkeypatch.chdir(tmp_path)
    configuration_file.write(tmp_path / "FILE", GPU_FILE)
    status, _, said = lsq_tune(*options)
    assert status == 2 and message in said and said.count("\n") == 1


def test_without_a_gpu_nothing_is_tuned(shapes, refused, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused("there is no GPU to tune for (torch sees no GPU", "tune", "--shapes", shapes)
    refused("on a CPU, `lsq tune --device cpu` measures", "tune", "--shapes", shapes)


@pytest.mark.skipif(not tiles.vectorised(), reason="plain C++ multiplies in one way")
def test_stored_types_are_tuned_on_a_cpu(tmp_path, monkeypatch, lsq_tune):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(tune_registers, "KINDS", ("2", "3 bytes", "6"))
    monkeypatch.setattr(tune_registers, "CODES", 2**14)
    monkeypatch.setattr(tune_registers, "SECONDS", 1e-5)
    registers._tuned.cache_clear()
    status, said, _ = lsq_tune("--device", "cpu", "--quiet")
    assert status == 0 and "tuned      3 stored types" in said
    found = registers.read(registers.path())
    assert {kind for kind, _ in found} == {"2", "3 bytes", "6"}
    assert all(0 <= rows <= registers.MOST for rows in found.values())
    registers._tuned.cache_clear()


def test_folders_that_may_not_be_written_are_refused_before_stored_types_are_timed(monkeypatch):
    monkeypatch.setattr(tune_registers, "_tuned", None)
    monkeypatch.setattr(tune_registers.tiles, "fastest", lambda: "amx")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="XDG_CONFIG_HOME .* may not write into"):
        tune_registers.run(True)


def test_ways_that_differ_are_told(monkeypatch):
    monkeypatch.setattr(tune_registers, "CODES", 2**14)
    monkeypatch.setattr("torch.equal", lambda *_: False)
    with pytest.raises(RuntimeError, match="2 bits: registers and tiles differ for 3 rows"):
        tune_registers._times("2", tiles.fastest(), 3)


def test_files_of_others_and_files_that_are_being_written(machine, shapes, tmp_path, lsq_tune):
    output = tmp_path / "file.json"
    given = ["--shapes", shapes, "--output", output, "--quiet"]
    with locked_file(output, "choose another --output"):
        status, _, said = lsq_tune(*given)
    assert status == 1 and f"process {os.getpid()} on " in said
    assert f"is writing into {output}" in said
    other = dataclasses.replace(GPU, device="Other GPU")
    configuration_file.write(output, dataclasses.replace(GPU_FILE, validators=other))
    status, _, said = lsq_tune(*given)
    assert status == 2 and "device differs: the file says 'Other GPU', here" in said


def test_interruption_and_failures_are_told(machine, shapes, tmp_path, lsq_tune):
    def stop(asked):
        if asked == KEYS[1]:
            raise KeyboardInterrupt

    given = ["--shapes", shapes, "--output", tmp_path / "file.json", "--quiet"]
    machine.run(before=stop)
    status, printed, _ = lsq_tune(*given)
    assert status == 130 and "1 were not reached" in printed
    assert "stopped    by Ctrl-C" in printed and "2.000 times as fast" in printed
    machine.run(faults={512: "row 1"})
    status, printed, _ = lsq_tune(*given)
    assert status == 1 and f"failed     {KEYS[1]}: the product is wrong" in printed


def test_reports(tmp_path):
    failed = [(key(m), "reason") for m in range(1, 9)]
    text = tune.report(Summary(path=tmp_path, left=0, failed=failed, refused=2, incomplete=1))
    assert text.count("failed ") == 5 and "and 3 more" in text
    assert "2 candidates were refused" in text and "1 had no time" in text
    times = dataclasses.replace(TIMES, other=160.0)
    entries = [entry(configuration=way, times=times) for way in (tile(), cublas(), tile(stages=4))]
    lines = tune.report(Summary(path=tmp_path, left=0, entries=[*entries, entry()])).splitlines()
    line = lines.index("in one     2 of 3: one kernel multiplies and ends; the others by cuBLASLt")
    assert lines[line + 1].split() == "2.000 times as fast as the other way on average".split()
