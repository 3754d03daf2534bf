"""`lsq tune`: what is tuned, into which file, and what is said. The GPU is a fake."""

import dataclasses
import os

import pytest

from lsq.commands import cli, tune
from lsq.files.lock import locked_file
from lsq.gemm import configuration_file
from lsq.gemm.tuner.search import Summary
from lsq.gemm.tuner.trial import Settings
from tests.gemm.operands import asked
from tests.gemm.tuned import GPU, TIMES, Machine, cublas, cublas_entry, entry, file, key, tile
from tests.gemm.tuner.fakes import FakeBackend

KEYS = [asked("project", 20, 48, 64), asked("project_weight_gradient", 48, 32, 41)]
TINY = (
    "--arch lsq_transformer --vocabulary-size 40 --encoder-layers 1 --decoder-layers 1"
    " --encoder-embed-dim 32 "
    "--encoder-ffn-embed-dim 48 --decoder-ffn-embed-dim 48 --share-all-embeddings"
    " --encoder-attention-heads 4 --decoder-attention-heads 4"
).split()
GPU_FILE = file(entry(64, configuration=tile()), entry(32, configuration=tile()), cublas_entry())


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


def main(*arguments):
    return cli.main(["tune", *map(str, arguments)])


def test_shapes_are_tuned_into_a_file_of_this_device(
    machine, shapes, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)  # the bar is for terminals
    output, picture = tmp_path / "more" / "file.json", tmp_path / "picture.png"
    assert main("--shapes", shapes, "--output", output, "--plot", picture) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("to tune    2 products\n")
    assert f"file       {output}\ntuned      2 products\n" in printed.out
    assert "tuning: 100%" in printed.err and "2/2" in printed.err and "times as fast" in printed.err
    found = configuration_file.read(output)
    assert found.validators == GPU and {each.key for each in found.entries} == set(KEYS)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main("--shapes", shapes, "--output", output, "--quiet") == 0
    printed = capsys.readouterr()
    assert "2 had an entry already; --again" in printed.out and "to tune" not in printed.out
    assert not printed.err
    assert main("--shapes", shapes, "--output", output, "--quiet", "--again") == 0
    assert "tuned      2 products" in capsys.readouterr().out


def test_the_default_file_is_the_users_and_is_found(machine, shapes):
    assert main("--shapes", shapes, "--quiet") == 0
    (found,) = configuration_file.search(GPU)
    assert found.path == machine.user / configuration_file.file_name(GPU) and found.refusal is None


def test_a_list_may_hold_nothing(machine, tmp_path, capsys):
    """As of a run whose products are all tuned."""
    listed = tmp_path / "list.csv"
    listed.write_text("op,m,n,k\n")
    assert main("--shapes", listed, "--output", tmp_path / "file.json", "--quiet") == 0
    assert "tuned      0 products" in capsys.readouterr().out


def test_products_are_listed_without_a_gpu(capsys):
    options = ["--max-tokens", "1000", "--step", "512", "--sentences", "2", "--beam", "4", "--list"]
    assert main(*TINY, *options) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading == "op,m,n,k,dtype,out,layout"
    assert len(lines) == len(set(lines))
    sizes = {int(line.split(",")[1]) for line in lines if line.startswith("project,")}
    assert sizes == {1024, 512, 8, 4}
    assert "project_weight_gradient,48,32,1024,,," in lines
    assert "matmul,48,32,512,float32,float32,tn" in lines
    assert main(*TINY, *options, "--backward", "int8") == 0
    assert "matmul,48,32,512" not in capsys.readouterr().out


def test_the_list_can_be_tuned(machine, tmp_path, capsys):
    assert main(*TINY, "--max-tokens", "32", "--sentences", "1", "--list") == 0
    listed = tmp_path / "list.csv"
    listed.write_text(capsys.readouterr().out)
    output = tmp_path / "file.json"
    assert main("--shapes", listed, "--output", output, "--quiet", "--seconds", "60") == 0
    entries = configuration_file.read(output).entries
    assert len(entries) == len(listed.read_text().splitlines()) - 1


@pytest.mark.parametrize("name", ["a.png", "a.svg", "a.pdf"])
def test_a_picture_alone(machine, tmp_path, name):
    output = tmp_path / "file.json"
    configuration_file.write(output, GPU_FILE)
    assert main("--output", output, "--plot", tmp_path / name) == 0
    assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say what to tune: --arch NAME or --shapes FILE"),
        (["--shapes", "x.csv", "--arch", "y"], "not allowed with argument"),
        (["--shapes", "x.csv", "--colour", "red"], "unrecognized arguments: --colour "),
        ([*TINY, "--colour", "red"], "unrecognized arguments: --colour "),
        (["--shapes", "x.csv", "--seconds", "0"], "'0' is not a number of seconds above 0"),
        (["--shapes", "x.csv", "--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_mistaken_options(capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        main(*options)
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and message in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "missing.csv"], "missing.csv is not there; check the path"),
        ([*TINY, "--step", "100"], "step is 100"),
        (["--arch", "transformer"], "arch is 'transformer'; allowed: lsq_transformer,"),
        (["--plot", "a.doc", "--output", "FILE"], "doc"),
        (["--shapes", "x.csv", "--device", "cpu"], "--device is cpu, and lsq tune is for GPUs: on"),
        ([*TINY, "--max-source-positions", "-1"], "--max-source-positions is -1; it must be from"),
    ],
)
def test_mistakes_are_told_in_one_line(machine, tmp_path, capsys, options, message):
    configuration_file.write(tmp_path / "FILE", GPU_FILE)
    paths = ("FILE", "missing.csv", "a.doc")
    assert main(*(tmp_path / option if option in paths else option for option in options)) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


def test_without_a_gpu_nothing_is_tuned(shapes, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main("--shapes", shapes) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("lsq tune: error: there is no GPU to tune for (torch sees no GPU")
    assert "on a CPU nothing is tuned" in printed and printed.count("\n") == 1


def test_files_of_others_and_files_that_are_being_written(machine, shapes, tmp_path, capsys):
    output = tmp_path / "file.json"
    with locked_file(output, "choose another --output"):
        assert main("--shapes", shapes, "--output", output, "--quiet") == 1
    printed = capsys.readouterr().err
    assert f"process {os.getpid()} on " in printed and f"is writing into {output}" in printed
    other = dataclasses.replace(GPU, device="Other GPU")
    configuration_file.write(output, dataclasses.replace(GPU_FILE, validators=other))
    assert main("--shapes", shapes, "--output", output, "--quiet") == 2
    assert "device differs: the file says 'Other GPU', here" in capsys.readouterr().err


def test_interruption_and_failures_are_told(machine, shapes, tmp_path, capsys):
    def stop(asked):
        if asked == KEYS[1]:
            raise KeyboardInterrupt

    output = tmp_path / "file.json"
    machine.run(before=stop)
    assert main("--shapes", shapes, "--output", output, "--quiet") == 130
    printed = capsys.readouterr().out
    assert "1 were not reached" in printed and "stopped    by Ctrl-C" in printed
    assert "2.000 times as fast" in printed
    machine.run(faults={512: "row 1"})
    assert main("--shapes", shapes, "--output", output, "--quiet") == 1
    assert f"failed     {KEYS[1]}: the product is wrong" in capsys.readouterr().out


def test_long_lists_of_failures_are_cut(tmp_path):
    failed = [(key(m), "reason") for m in range(1, 9)]
    text = tune.report(Summary(path=tmp_path, left=0, failed=failed, refused=2, incomplete=1))
    assert text.count("failed ") == 5 and "and 3 more" in text
    assert "2 candidates were refused" in text and "1 had no time" in text


def test_it_is_said_how_much_faster_the_chosen_way_is(tmp_path):
    times = dataclasses.replace(TIMES, other=160.0)
    entries = [entry(configuration=way, times=times) for way in (tile(), cublas(), tile(stages=4))]
    lines = tune.report(Summary(path=tmp_path, left=0, entries=[*entries, entry()])).splitlines()
    place = lines.index("in one     2 of 3: one kernel multiplies and ends; the others by cuBLASLt")
    assert lines[place + 1].split() == "2.000 times as fast as the other way on average".split()
