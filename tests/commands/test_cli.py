"""`lsq`: commands and their help, exit statuses, and messages of one line."""

import os
import signal
import subprocess
import sys

import pytest
from fairseq import checkpoint_utils

from lsq import extras
from lsq.commands import COMMANDS, EXTRAS, cli
from lsq.commands.interruption import Interrupted
from lsq.commands.user_dir import user_dir
from lsq.dist.roll_call import RankLost
from lsq.fairseq.compatibility import CheckpointNotWritten
from lsq.native.sources import LibraryError
from tests.sampling import first
from tests.without_fairseq import refused as refused_without_fairseq
from tests.without_fairseq import run_lsq


@pytest.fixture
def command(monkeypatch):
    """command(function): `lsq user-dir` calls this instead."""
    return lambda function: monkeypatch.setattr("lsq.commands.user_dir.run", function)


def raising(error: BaseException):
    def run(arguments):
        raise error

    return run


def test_help_lists_every_command(lsq):
    status, printed, _ = lsq("--help")
    assert status == 0
    for name, text in COMMANDS.items():
        assert f"  {name} " in printed and text in printed
    assert lsq("--version")[1].startswith("lsq 0.")
    done = subprocess.run([sys.executable, "-m", "lsq", "--version"], capture_output=True)
    assert done.stdout.startswith(b"lsq ")


@pytest.mark.thorough
def test_names_of_files_need_not_be_text(tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff.csv"
    with open(name, "wb") as file:
        file.write(b"id,lower,upper,size\na,0,1,2\n")
    code = (
        "import sys; from lsq.commands import cli;"
        " sys.exit(cli.main(sys.argv[1:]) or print(sys.argv[-1]))"
    )
    given = [sys.executable, "-c", code, "plan", "--output", name[:-3] + b"json", name]
    done = subprocess.run(given, capture_output=True, check=True)
    assert done.stdout.endswith(name + b"\n") and not done.stderr
    assert b"peak         2 bytes" in done.stdout and os.path.exists(name[:-3] + b"json")
    done = subprocess.run([*given[:4], b"no\xfffile"], capture_output=True)
    said = b"lsq plan: error: no\\udcfffile is not there; check the path\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize("arguments", first(["plan FILE", "--help", "user-dir"], 2))
def test_a_reader_that_has_gone_ends_a_command_silently(arguments, tmp_path):
    rows = "".join(f"{n},0,1,2\n" for n in range(9))
    (tmp_path / "FILE").write_text("id,lower,upper,size\n" + rows)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "lsq", *arguments.split()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""}
    streams = {"stdout": writing, "stderr": subprocess.PIPE}
    done = subprocess.run(command, cwd=tmp_path, env=environment, **streams)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_help_is_quick():
    code = (
        "import sys, lsq.commands.cli; lsq.commands.cli.parser(); assert not {'torch', 'fairseq'} &"
        " sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_refuses_unknown_options(name, lsq):
    status, printed, _ = lsq(name, "--help")
    assert status == 0 and f"usage: lsq {name}" in printed
    status, _, said = lsq(name, "--no-such-option", "1")
    assert status == 2 and said.startswith(f"lsq {name}: error: ") and said.count("\n") == 1


OF_EXTRAS = tuple(module for extra in extras.EXTRAS.values() for module in extra.modules)


@pytest.mark.thorough
def test_every_command_has_help_without_what_an_extra_brings():
    found = run_lsq([[name, "--help"] for name in COMMANDS], missing=OF_EXTRAS)
    for name, (status, out, err) in zip(COMMANDS, found, strict=True):
        assert (status, err) == (0, "") and out.startswith(f"usage: lsq {name} "), name


def test_what_is_missing_is_named_with_a_remedy(command, lsq):
    for module, package in (("fairseq.tasks", "fairseq-fixed"), ("tqdm.auto", "tqdm")):
        command(raising(ModuleNotFoundError(f"No module named {module!r}", name=module)))
        said = f"lsq user-dir: error: this needs {extras.explanation(module)}\n"
        assert lsq("user-dir") == (2, "", said)
        assert package in extras.explanation(module)
    command(raising(ModuleNotFoundError("No module named 'lsq.no'", name="lsq.no")))
    with pytest.raises(ModuleNotFoundError):  # a fault of lsq's
        lsq("user-dir")


def test_commands_say_at_once_what_they_lack():
    """Before anything that takes long, or any mistake in the options."""
    found = run_lsq([[name, "--no-such-option"] for name in EXTRAS], missing=OF_EXTRAS)
    for name, (status, out, err) in zip(EXTRAS, found, strict=True):
        needed = [package for one in EXTRAS[name] for package in extras.EXTRAS[one].packages]
        verb = "is" if len(needed) == 1 else "are"
        reason = f"this command needs {', '.join(needed)}, which {verb} not installed"
        said = f"lsq {name}: error: {reason}: {extras.command(*EXTRAS[name])}\n"
        assert (status, out, err) == (2, "", said)


@pytest.mark.thorough
def test_files_that_are_missing_are_named_without_fairseq(tmp_path):
    missing, output = str(tmp_path / "missing"), str(tmp_path / "o")
    lines = (
        ["translate", "--model", missing],
        ["serve", "--model", missing, "--port", "0"],
        ["formats", "--model", missing],
        ["sensitivity", "--model", missing, "--output", output],
        ["export", missing, "--to", "lsq", "--output", output],
        ["convert-checkpoint", missing, "--bits", "8", "--output", output],
    )
    assert all(missing in said for said in refused_without_fairseq(*lines))


def test_a_mistaken_command_is_told_what_there_is(lsq):
    for given, meant in (
        ("sparsify", "."),
        ("text-train", "; did you mean train-text?"),
        ("trian", "; did you mean"),
    ):
        status, _, said = lsq(given)
        assert status == 2 and f"lsq: error: there is no command {given!r}{meant}" in said
        assert f"The commands are {', '.join(COMMANDS)}\n" in said
    status, _, said = lsq()
    assert status == 2 and "lsq: error:" in said


def test_user_dir(lsq):
    folder = user_dir()
    assert lsq("user-dir") == (0, f"{folder}\n", "") and (folder / "__init__.py").exists()
    beside = [path.name for path in folder.parent.iterdir() if path.name != "__pycache__"]
    assert beside == ["lsq_fairseq"]


MISSING = ModuleNotFoundError("No module", name="fairseq.tasks")
INTERRUPTED = Interrupted(15, "stopped by SIGTERM after 3 updates; wrote x")
NO_FILE = FileNotFoundError(2, "No such file or directory", "x")
DENIED = PermissionError(13, "Permission denied", "x")
LONG = "x" * 666 + " ... " + "x" * 334 + "\n"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("3 is\nodd"), 2, "error: 3 is odd"),
        (ValueError("x" * 5000), 2, f"error: {LONG}"),
        (FileNotFoundError("there is no file x"), 2, "error: there is no file x"),
        (NO_FILE, 2, "error: x is not there; check the path"),
        (DENIED, 2, "error: x may not be read or written by this user; change"),
        (BrokenPipeError(32, "Broken pipe"), 1, "error: [Errno 32] Broken pipe\n"),
        (CheckpointNotWritten("could not write x"), 1, "error: could not write x"),
        (FloatingPointError("a weight holds NaN"), 1, "error: a weight holds NaN"),
        (Exception("Could not infer language"), 2, "error: Could not infer language"),
        (INTERRUPTED, 143, "stopped by SIGTERM after 3 updates"),
        (RankLost("rank 2 is gone:\ngloo"), 1, "error: rank 2 is gone: gloo"),
        (LibraryError("x.so is damaged; build it"), 1, "error: x.so is damaged; build it"),
        (RuntimeError("[fail] can't allocate memory: 9"), 1, "error: not enough memory ([fail"),
        (MemoryError(), 1, "error: not enough memory"),
        (MISSING, 2, "error: this needs fairseq-fixed, which is"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C (SIGINT)"),
    ],
)
def test_mistakes_are_told_in_one_line(command, lsq, error, status, message):
    command(raising(error))
    found, out, said = lsq("user-dir")
    assert (found, out, said.count("\n")) == (status, "", 1)
    assert said.startswith(f"lsq user-dir: {message}")


@pytest.mark.parametrize(
    ("statement", "status", "message"),
    [
        ("assert 1 > 2, '--temperature must be above 0'", 2, "--temperature must be above 0"),
        ("raise ImportError('Please install apex')", 2, "Please install apex"),
        ("raise NotImplementedError('Unknown option: x')", 2, "Unknown option: x"),
        ("raise KeyError('a')", 1, "fairseq failed (KeyError: 'a'); check the options"),
        ("import ast; ast.literal_eval('(1,')", 1, "fairseq failed (SyntaxError: '(' was never"),
        ("1 / 0", 1, "fairseq failed (ZeroDivisionError: division by zero); check"),
    ],
)
def test_what_fairseq_fails_on_is_told_in_one_line(command, lsq, statement, status, message):
    module = {"__name__": "fairseq.search"}
    exec(f"def fail(arguments):\n    {statement}", module)
    command(module["fail"])
    found, _, said = lsq("user-dir")
    assert found == status and said.count("\n") == 1
    assert said.startswith(f"lsq user-dir: error: {message}")
    with pytest.raises(Exception):  # noqa: B017  whatever it was
        cli.main(["--traceback", "user-dir"])


def test_what_fairseq_hides_is_shown(command, refused):
    def run(arguments):
        try:
            raise RuntimeError("size mismatch for encoder")
        except RuntimeError:
            raise Exception("Cannot load model parameters from checkpoint x") from None

    command(run)
    refused("checkpoint x (size mismatch for encoder)", "user-dir")
    command(lambda arguments: checkpoint_utils.load_model_ensemble_and_task(["x"], num_shards=0))
    refused("error: assert num_shards > 0\n", "user-dir")


def test_arguments_reach_the_command_and_bugs_keep_their_traceback(command):
    seen = []
    command(lambda arguments: seen.append(arguments) or 7)
    assert cli.main(["user-dir", "-x", "--", "--help", "y"]) == 7
    assert seen == [["-x", "--", "--help", "y"]]
    for error in (TypeError("a bug"), RuntimeError("a bug"), AssertionError()):
        command(raising(error))
        with pytest.raises(type(error)):
            cli.main(["user-dir"])
    command(raising(ValueError("3 is odd")))
    with pytest.raises(ValueError, match="odd"):
        cli.main(["--traceback", "user-dir"])
