"""`lsq tune`: what is tuned, into which file, and what is said."""

import dataclasses
import os
import signal
import subprocess
import sys

import pytest
import torch

from lsq.commands import cli, tune
from lsq.files.lock import locked_file
from lsq.gemm import configuration_file, device
from lsq.gemm.tuner.search import Summary
from lsq.gemm.tuner.trial import Settings
from tests.gemm.operands import asked
from tests.gemm.tuned import CPU, TIMES, cublas, entry, file, key, tile
from tests.gemm.tuner.fakes import FakeBackend

KEYS = [asked("project", 20, 48, 64), asked("project_weight_gradient", 48, 32, 41)]
TINY = (
    "--arch lsq_transformer --vocabulary-size 40 --encoder-layers 1 --decoder-layers 1"
    " --encoder-embed-dim 32 "
    "--encoder-ffn-embed-dim 48 --decoder-ffn-embed-dim 48 --share-all-embeddings"
).split()


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """Operands that fit the cache, and rounds of one run: nothing is timed for its own sake."""
    settings = Settings(rounds=3, final_rounds=3, seconds=1e-6)
    monkeypatch.setattr("lsq.gemm.tuner.cpu.last_level_cache", lambda: 2**14)
    monkeypatch.setattr("lsq.gemm.tuner.search.Settings", lambda: settings)


@pytest.fixture
def shapes(tmp_path):
    found = tmp_path / "shapes.csv"
    found.write_text("op,m,n,k\nproject,20,48,64\nproject_weight_gradient,48,32,41\n")
    return found


def main(*arguments):
    return cli.main(["tune", "--device", "cpu", *map(str, arguments)])


def test_shapes_are_tuned_into_a_file_of_this_device(shapes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)  # the bar is for terminals
    output, picture = tmp_path / "more" / "file.json", tmp_path / "picture.png"
    assert main("--shapes", shapes, "--output", output, "--plot", picture) == 0
    printed = capsys.readouterr()
    assert f"file       {output}\ntuned      2 products\n" in printed.out
    assert printed.out.startswith("to tune    2 products, which take a minute or less\n")
    assert (
        "tuning: 100%" in printed.err
        and "2/2 products" in printed.err
        and "times as fast" in printed.err
    )
    found = configuration_file.read(output)
    assert found.validators == device.here("cpu") and {one.key for one in found.entries} == set(
        KEYS
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main("--shapes", shapes, "--output", output, "--quiet") == 0
    printed = capsys.readouterr()
    assert (
        "2 had an entry already; --again" in printed.out
        and not printed.err
        and "to tune" not in printed.out
    )
    assert main("--shapes", shapes, "--output", output, "--quiet", "--again") == 0
    assert "tuned      2 products" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "a minute or less"),
        (89, "a minute or less"),
        (91, "about 2 minutes"),
        (7000, "about 117 minutes"),
        (7300, "about 2 hours"),
    ],
)
def test_durations(seconds, said):
    assert tune.duration(seconds) == said


def test_the_default_file_is_the_users_and_is_found(shapes, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main("--shapes", shapes, "--quiet") == 0
    here = device.here("cpu")
    found, *_ = configuration_file.find(here)
    assert (
        found.path == tmp_path / "lsq" / "gemm" / device.file_name(here) and found.refusal is None
    )


def test_a_list_is_of_one_kind_of_device(tmp_path, capsys):
    """Products by themselves are a GPU's; operations are of either."""
    listed = tmp_path / "list.csv"
    listed.write_text("op,m,n,k\nproject,64,128,256\n")
    for kind in ("cpu", "cuda"):
        given = ["--shapes", str(listed), "--device", kind]
        assert tune.products(*tune.parser().parse_known_args(given))[1] == kind
    listed.write_text("op,m,n,k\nproject,64,128,256\nmatmul,64,128,256\n")
    assert tune.products(*tune.parser().parse_known_args(["--shapes", str(listed)]))[1] == "cuda"
    assert cli.main(["tune", "--shapes", str(listed), "--device", "cpu"]) == 2
    assert "lists products of a run on cuda, and --device is cpu" in capsys.readouterr().err


def test_a_list_may_hold_nothing(tmp_path, capsys):
    """As of a run whose products are all tuned."""
    listed = tmp_path / "list.csv"
    listed.write_text("op,m,n,k\n")
    assert main("--shapes", listed, "--output", tmp_path / "file.json", "--quiet") == 0
    assert "tuned      0 products" in capsys.readouterr().out


def test_products_of_an_architecture(capsys):
    assert main(*TINY, "--max-tokens", "1000", "--beam", "4", "--sentences", "2", "--list") == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading == "op,m,n,k"
    tokens = {int(line.split(",")[1]) for line in lines if line.startswith("vocabulary")}
    assert tokens == {*range(64, 961, 64), 1024}
    assert "project,8,32,32" in lines and "project,4,32,32" in lines
    assert "project_weight_gradient,48,32,1024" in lines
    assert len(lines) == len(set(lines))
    assert (
        main(*TINY, "--max-tokens", "1024", "--step", "512", "--backward", "float", "--list") == 0
    )
    lines = capsys.readouterr().out.splitlines()[1:]
    assert {line.split(",")[1] for line in lines if line.startswith("vocabulary")} == {
        "512",
        "1024",
    }
    assert not any(line.startswith("project_") for line in lines)


def test_the_package_holds_what_the_cpu_is_asked_for():
    """What nothing asks for is not in it. What came later waits for a processor of that kind."""
    command = (
        "--arch lsq_transformer --device cpu --max-tokens 4096 --backward int8 --step 1024".split()
    )
    keys, kind = tune.products(*tune.parser().parse_known_args(command))
    (path,) = configuration_file.PACKAGE_FOLDER.glob("*.json")
    held = {each.key for each in configuration_file.read(path).entries}
    missing = set(keys) - held
    assert kind == "cpu" and held <= set(keys)
    assert {(each.op, each.n, each.k) for each in missing} == {
        ("project", 512, 2048),
        ("project", 32000, 512),
        ("vocabulary_loss_gradient", 32000, 512),
    }


def test_products_of_a_gpu_are_listed_without_one(capsys):
    options = ["--max-tokens", "64", "--step", "32", "--sentences", "1", "--beam", "1", "--list"]
    options += ["--encoder-attention-heads", "4", "--decoder-attention-heads", "4"]
    assert cli.main(["tune", "--device", "cuda", *TINY, *options]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading == "op,m,n,k,dtype,out,layout"
    assert "project,64,96,32,,," in lines and "matmul,48,32,64,float32,float32,tn" in lines
    assert len(lines) == len(set(lines)) and {line.split(",")[0] for line in lines} >= {
        "matmul",
        "project",
    }


def test_the_list_can_be_tuned(tmp_path, capsys):
    assert main(*TINY, "--max-tokens", "32", "--sentences", "1", "--list") == 0
    listed = tmp_path / "list.csv"
    listed.write_text(capsys.readouterr().out)
    assert (
        main("--shapes", listed, "--output", tmp_path / "file.json", "--quiet", "--seconds", "60")
        == 0
    )
    assert (
        len(configuration_file.read(tmp_path / "file.json").entries)
        == len(listed.read_text().splitlines()) - 1
    )


def test_a_picture_alone(tmp_path, monkeypatch):
    output = tmp_path / "file.json"
    configuration_file.write(output, file(entry(64), entry(32), key_entry("vocabulary_loss")))
    for name in ("a.png", "a.svg", "a.pdf"):
        assert main("--output", output, "--plot", tmp_path / name) == 0
        assert (tmp_path / name).stat().st_size > 1000


def key_entry(op):
    return dataclasses.replace(entry(64), key=key(64, op=op))


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
        cli.main(["tune", *options])
    printed = capsys.readouterr().err
    assert stopped.value.code == 2 and message in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "missing.csv"], "missing.csv is not there; check the path"),
        ([*TINY, "--step", "100"], "step is 100"),
        (["--arch", "transformer"], "arch is 'transformer'; allowed: lsq_transformer,"),
        (["--plot", "a.doc", "--output", "FILE"], "doc"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, capsys, options, message):
    configuration_file.write(tmp_path / "FILE", file(entry(64)))
    options = [
        str(tmp_path / option) if option in ("FILE", "missing.csv", "a.doc") else option
        for option in options
    ]
    assert main(*options) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


def test_files_of_others_and_files_that_are_being_written(shapes, tmp_path, capsys):
    output = tmp_path / "file.json"
    with locked_file(output, "choose another --output"):
        assert main("--shapes", shapes, "--output", output, "--quiet") == 1
    printed = capsys.readouterr().err
    assert f"process {os.getpid()} on " in printed and f"is writing into {output}" in printed
    configuration_file.write(
        output, file(entry(64), validators=dataclasses.replace(CPU, device="Other CPU"))
    )
    assert main("--shapes", shapes, "--output", output, "--quiet") == 2
    assert "device differs: the file says 'Other CPU', here" in capsys.readouterr().err


def test_interruption_and_failures_are_told(shapes, tmp_path, capsys, monkeypatch):
    def stop(asked):
        if asked == KEYS[1]:
            raise KeyboardInterrupt

    times = {512: 1.0, 7: 0.5}
    output = tmp_path / "file.json"
    monkeypatch.setattr(tune, "trials", lambda *_, **__: FakeBackend(times, before=stop).trial)
    assert main("--shapes", shapes, "--output", output, "--quiet") == 130
    printed = capsys.readouterr().out
    assert (
        "1 were not reached" in printed
        and "stopped    by Ctrl-C" in printed
        and "2.000 times as fast" in printed
    )
    monkeypatch.setattr(
        tune, "trials", lambda *_, **__: FakeBackend(times, faults={512: "row 1"}).trial
    )
    assert main("--shapes", shapes, "--output", output, "--quiet") == 1
    assert f"failed     {KEYS[1]}: the product is wrong" in capsys.readouterr().out


def test_long_lists_of_failures_are_cut(tmp_path):
    failed = [(key(m), "reason") for m in range(1, 9)]
    text = tune.report(Summary(path=tmp_path, left=0, failed=failed, refused=2, incomplete=1))
    assert text.count("failed ") == 5 and "and 3 more" in text
    assert "2 candidates were refused" in text and "1 had no time" in text


def test_it_is_said_how_much_faster_the_chosen_way_of_a_gpu_is(tmp_path):
    times = dataclasses.replace(TIMES, other=160.0)
    entries = [entry(configuration=way, times=times) for way in (tile(), cublas(), tile(stages=4))]
    lines = tune.report(Summary(path=tmp_path, left=0, entries=[*entries, entry()])).splitlines()
    place = lines.index("in one     2 of 3: one kernel multiplies and ends; the others by cuBLASLt")
    assert lines[place + 1].split() == "2.000 times as fast as the other way on average".split()


@pytest.mark.thorough
def test_the_number_of_threads_is_chosen(shapes, tmp_path):
    command = [
        sys.executable,
        "-m",
        "lsq.commands.cli",
        "tune",
        "--device",
        "cpu",
        "--quiet",
        "--threads",
        "2",
    ]
    command += ["--shapes", str(shapes), "--output", str(tmp_path / "file.json")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    assert configuration_file.read(tmp_path / "file.json").validators.threads == 2


@pytest.mark.slow
def test_ctrl_c_on_the_command_line(tmp_path):
    """On real products: what is done is in the file, and the next command goes on."""
    output = tmp_path / "file.json"
    command = [
        sys.executable,
        "-m",
        "lsq.commands.cli",
        "tune",
        "--device",
        "cpu",
        *TINY,
        "--max-tokens",
        "2048",
        "--output",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, str(output)], env=environment, **pipes) as run:
        while not output.exists():
            assert run.poll() is None
            torch.randn(10)
        run.send_signal(signal.SIGINT)
        printed = run.communicate()[0].decode()
    assert run.returncode == 130 and "stopped    by Ctrl-C" in printed
    assert configuration_file.read(output).entries


def test_a_gpu_is_asked_for_where_there_is_none(shapes, capsys, monkeypatch):
    shapes.write_text("op,m,n,k\nmatmul,64,128,256\n")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["tune", "--shapes", str(shapes), "--device", "cuda"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(
        "lsq tune: error: products are to be tuned on cuda, and torch sees no GPU here; install"
    )
    assert printed.count("\n") == 1


def test_options_of_training_are_checked(capsys):
    assert main(*TINY, "--max-source-positions", "-1", "--list") == 2
    assert "--max-source-positions is -1; it must be from 1" in capsys.readouterr().err
