import json
import re
from pathlib import Path

import pytest

from lsq.commands.plan import _buffers, run
from lsq.memory.planner import plan
from lsq.native import tiles

ROWS = "id,lower,upper,size\na,0,3,4\nb,2,5,2\nc,4,6,4\n"


@pytest.fixture
def file(tmp_path):
    found = tmp_path / "buffers.csv"
    found.write_text(ROWS)
    return found


def test_report(file, lsq):
    status, printed, said = lsq("plan", file)
    lines = printed.splitlines()
    assert (status, said) == (0, "")
    assert "peak         6 bytes (0.0 MiB)" in lines
    assert "lower bound  6 bytes" in lines and "gap          0.0000%" in lines
    assert "method       portfolio" in lines
    assert "alive at operation 2, where most bytes are: 2 buffers" in lines
    assert [line.split() for line in lines[-2:]] == ["4 a (0 to 2)".split(), "2 b (2 to 4)".split()]


def test_output(file, tmp_path, lsq):
    output, other = tmp_path / "plan.csv", tmp_path / "plan.json"
    assert lsq("plan", file, "--output", output, "--method", "greedy_by_size")[0] == 0
    assert output.read_text() == "id,offset\na,0\nb,4\nc,0\n"
    assert lsq("plan", file, "--output", other, "--align", "16")[0] == 0
    assert json.loads((tmp_path / "plan.json").read_text())["offsets"] == {"a": 0, "b": 16, "c": 0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--method exact --time-limit 5 --quiet", "capacity     met"),
        ("--capacity 5", "capacity     not met"),
        ("--plot map.png", "peak         6 bytes"),
    ],
)
def test_options(file, lsq, tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    status, printed, _ = lsq("plan", file, *options.split())
    assert status == 0 and said in printed
    if "--plot" in options:
        assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    file.write_text("id,lower,upper,size\n" + "".join(f"b{n},0,1,4\n" for n in range(25)))
    assert lsq("plan", file)[1].count("  and ") == 1  # long lists are cut


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (ROWS, "--method best", "invalid choice: 'best'"),
        (ROWS, "--capacity -1", "'-1' is not a whole number above 0"),
        (ROWS, "--time-limit 0", "'0' is not a number of seconds above 0"),
        (None, "", "wrong.csv is not there; check the path"),
        ("id,lower\n", "", "line 1: no column upper, size"),
        (ROWS, "--align 3", "alignment is 3; it must be a power of two"),
        (ROWS, "--plot map.doc", "doc"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, lsq, text, options, message):
    file = tmp_path / "wrong.csv"
    if text is not None:
        file.write_text(text)
    status, _, said = lsq("plan", file, *options.split())
    assert status == 2 and message in said and said.count("\n") == 1


TINY_STEP = (
    "--arch lsq_transformer --vocabulary-size 40 --encoder-layers 1 --decoder-layers 1"
    " --encoder-embed-dim 32 --encoder-ffn-embed-dim 48 --decoder-ffn-embed-dim 48"
    " --share-all-embeddings"
).split()


def test_a_training_step_is_planned_by_its_options(tmp_path, capsys):
    picture = tmp_path / "map.png"
    sizes = {}
    for mode, tokens in (("int8", 64), ("int8", 640), ("float", 640)):
        more = ["--lsq-mode", mode, "--max-tokens", str(tokens), "--max-source-positions", "32"]
        assert run([*TINY_STEP, *more, "--max-target-positions", "32", "--plot", str(picture)]) == 0
        output = capsys.readouterr().out
        assert "coder.layers.0/" in output
        sizes[mode, tokens] = int(re.search(r"peak +(\d+) bytes", output)[1])
    assert 5 * sizes["int8", 64] < sizes["int8", 640] < 11 * sizes["int8", 64]
    assert sizes["float", 640] > sizes["int8", 640]
    assert picture.stat().st_size > 0


def test_a_step_on_a_gpu_that_is_not_here(capsys):
    limits = ["--max-tokens", "640", "--max-source-positions", "32", "--max-target-positions", "32"]
    peaks = {}
    for where in ("cpu", "cuda", "cuda --lsq-activations float32", "emulator"):
        assert run([*TINY_STEP, *limits, "--lsq-device", *where.split()]) == 0
        output = capsys.readouterr().out
        wide = where in ("cpu", "emulator") or where.endswith("float32")
        name = "cuda" if where == "emulator" else where.split()[0]
        assert output.startswith(
            f"planned for  {name}, activations in {'float32' if wide else 'bfloat16'}\n"
        )
        peaks[where] = int(re.search(r"peak +(\d+) bytes", output)[1])
    assert peaks["cuda"] < peaks["cuda --lsq-activations float32"] == peaks["emulator"]
    with pytest.raises(ValueError, match="--lsq-activations bfloat16 is for cuda and the emulator"):
        run([*TINY_STEP, *limits, "--lsq-device", "cpu", "--lsq-activations", "bfloat16"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--arch transformer --max-tokens 64", "arch is 'transformer'; allowed: lsq_transformer,"),
        ("--arch lsq_transformer", "--max-tokens or --batch-size"),
        (
            "--arch lsq_transformer --criterion cross_entropy",
            "--criterion lsq_label_smoothed_cross_entropy",
        ),
    ],
)
def test_a_step_that_cannot_be_planned(arguments, message, refused):
    refused("required: FILE.csv", "plan")
    unknown = [*TINY_STEP, "--max-tokens", "64", "--colour", "red"]
    refused("unrecognized arguments: --colour ", "plan", *unknown)
    with pytest.raises(ValueError, match=message):
        run(arguments.split())


MEMORY = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()


@pytest.fixture
def tiled(monkeypatch):
    monkeypatch.setattr(tiles, "usable", lambda: ("avx512_vnni", "plain"))


@pytest.mark.thorough
def test_the_documentation_has_todays_figures(tiled):
    """The command under the picture gives what the log is said to say."""
    command = re.search(r"lsq plan ([^`]+) --plot memory.png", MEMORY)[1]
    command = command.replace("\\", " ").split()
    _, buffers = _buffers(command)
    made = plan(buffers)
    peak = f"{made.peak / 2**20:.1f} MiB"
    said = f"{len(buffers)} tensors of a training step in {peak}, {made.gap:.2%} above the lower"
    assert f"memory (planned): {said} bound" in MEMORY
