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
from tests.without_fairseq import run_lsq


@pytest.fixture
def command(monkeypatch):
    """command(function): `lsq user-dir` calls this instead."""
    return lambda function: monkeypatch.setattr("lsq.commands.user_dir.run", function)


def raising(error: BaseException):
    def run(arguments):
        raise error

    return run


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    for name, text in COMMANDS.items():
        assert f"  {name} " in printed and text in printed


def test_python_m_lsq():
    assert subprocess.run(
        [sys.executable, "-m", "lsq", "--version"], capture_output=True
    ).stdout.startswith(b"lsq ")


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("lsq 0.")


def test_names_of_files_need_not_be_text(tmp_path):
    """They are printed as they are."""
    name = os.fsencode(tmp_path) + b"/\xff.csv"
    with open(name, "wb") as file:
        file.write(b"id,lower,upper,size\na,0,1,2\n")
    code = (
        "import sys; from lsq.commands import cli;"
        " sys.exit(cli.main(sys.argv[1:]) or print(sys.argv[-1]))"
    )
    given = [sys.executable, "-c", code, "plan", "--output", name[:-3] + b"json", name]
    done = subprocess.run(given, capture_output=True, check=True)
    assert (
        done.stdout.endswith(name + b"\n")
        and b"peak         2 bytes" in done.stdout
        and not done.stderr
    )
    assert os.path.exists(name[:-3] + b"json")
    done = subprocess.run([*given[:4], b"no\xfffile"], capture_output=True)
    assert (done.returncode, done.stderr) == (
        2,
        b"lsq plan: error: no\\udcfffile is not there; check the path\n",
    )


@pytest.mark.parametrize(
    "arguments", [["user-dir"], ["user-dir", "--help"], ["--help"], ["plan", "FILE"]]
)
def test_a_reader_that_has_gone_ends_a_command_silently(arguments, tmp_path):
    (tmp_path / "FILE").write_text(
        "id,lower,upper,size\n" + "".join(f"{n},0,1,2\n" for n in range(9))
    )
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "lsq", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, cwd=tmp_path, env=environment
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_other_pipes_that_break_are_told(command, capsys):
    command(raising(BrokenPipeError(32, "Broken pipe")))
    assert cli.main(["user-dir"]) == 1
    assert capsys.readouterr().err == "lsq user-dir: error: [Errno 32] Broken pipe\n"


def test_help_is_quick():
    """It imports neither torch nor fairseq."""
    code = (
        "import sys, lsq.commands.cli; lsq.commands.cli.parser(); assert not {'torch', 'fairseq'} &"
        " sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("arguments", [[], ["no-such-command"]])
def test_mistaken_command(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "lsq: error:" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0
    assert f"usage: lsq {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_unknown_options(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--no-such-option", "1"])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"lsq {name}: error: ") and printed.err.count("\n") == 1


OF_EXTRAS = tuple(module for extra in extras.EXTRAS.values() for module in extra.modules)


def test_every_command_has_help_without_what_an_extra_brings():
    found = run_lsq([[name, "--help"] for name in COMMANDS], missing=OF_EXTRAS)
    for name, (status, out, err) in zip(COMMANDS, found, strict=True):
        assert (status, err) == (0, "") and out.startswith(f"usage: lsq {name} "), name


def test_what_is_missing_is_named_with_a_remedy(command, capsys):
    for module, package in (("fairseq.tasks", "fairseq-fixed"), ("tqdm.auto", "tqdm")):
        command(raising(ModuleNotFoundError(f"No module named {module!r}", name=module)))
        assert cli.main(["user-dir"]) == 2
        assert capsys.readouterr().err == (
            f"lsq user-dir: error: this needs {extras.explanation(module)}\n"
        )
        assert package in extras.explanation(module)
    command(raising(ModuleNotFoundError("No module named 'lsq.no'", name="lsq.no")))
    with pytest.raises(ModuleNotFoundError):  # a fault of lsq's
        cli.main(["user-dir"])


def test_commands_say_at_once_what_they_lack():
    """Before anything that takes long, or any mistake in the options."""
    names = list(EXTRAS)
    found = run_lsq([[name, "--no-such-option"] for name in names], missing=OF_EXTRAS)
    for name, (status, out, err) in zip(names, found, strict=True):
        needed = [package for one in EXTRAS[name] for package in extras.EXTRAS[one].packages]
        verb = "is" if len(needed) == 1 else "are"
        assert (status, out, err) == (
            2,
            "",
            f"lsq {name}: error: this command needs {', '.join(needed)}, which {verb} not"
            f" installed: {extras.command(*EXTRAS[name])}\n",
        )


def test_a_mistaken_command_is_told_what_there_is(capsys):
    for given, meant in (
        ("sparsify", "."),
        ("text-train", "; did you mean train-text?"),
        ("trian", "; did you mean"),
    ):
        with pytest.raises(SystemExit):
            cli.main([given])
        printed = capsys.readouterr().err
        assert f"lsq: error: there is no command {given!r}{meant}" in printed
        assert f"The commands are {', '.join(COMMANDS)}\n" in printed


def test_user_dir(capsys):
    assert cli.main(["user-dir"]) == 0
    folder = user_dir()
    assert capsys.readouterr().out == f"{folder}\n"
    assert (folder / "__init__.py").exists()
    assert [path.name for path in folder.parent.iterdir() if path.name != "__pycache__"] == [
        "lsq_fairseq"
    ]


def test_doctor(capsys):
    assert cli.main(["doctor"]) == 0
    assert "CPU" in capsys.readouterr().out


def test_arguments_reach_the_command(command):
    seen = []
    command(lambda arguments: seen.append(arguments) or 7)
    assert cli.main(["user-dir", "-x", "--", "--help", "y"]) == 7
    assert seen == [["-x", "--", "--help", "y"]]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("3 is\nodd"), 2, "error: 3 is odd"),
        (ValueError("x" * 5000), 2, "error: " + "x" * 666 + " ... " + "x" * 334 + "\n"),
        (FileNotFoundError("there is no file x"), 2, "error: there is no file x"),
        (
            FileNotFoundError(2, "No such file or directory", "x"),
            2,
            "error: x is not there; check the path",
        ),
        (
            PermissionError(13, "Permission denied", "x"),
            2,
            "error: x may not be read or written by this user; change",
        ),
        (CheckpointNotWritten("could not write x"), 1, "error: could not write x"),
        (FloatingPointError("a weight holds NaN"), 1, "error: a weight holds NaN"),
        (Exception("Could not infer language pair"), 2, "error: Could not infer language pair"),
        (
            Interrupted(15, "stopped by SIGTERM after 3 updates; wrote x"),
            143,
            "stopped by SIGTERM after 3 updates",
        ),
        (RankLost("rank 2 no longer answers:\ngloo"), 1, "error: rank 2 no longer answers: gloo"),
        (
            LibraryError("libcpu_v3.so is damaged; build it again"),
            1,
            "error: libcpu_v3.so is damaged; build it again",
        ),
        (
            RuntimeError("[enforce fail] can't allocate memory: 9 bytes"),
            1,
            "error: not enough memory ([enforce",
        ),
        (MemoryError(), 1, "error: not enough memory"),
        (
            ModuleNotFoundError("No module", name="fairseq.tasks"),
            2,
            "error: this needs fairseq-fixed, which is",
        ),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C (SIGINT)"),
    ],
)
def test_mistakes_are_told_in_one_line(command, capsys, error, status, message):
    command(raising(error))
    assert cli.main(["user-dir"]) == status
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith(f"lsq user-dir: {message}")


def test_what_fairseq_hides_is_shown(command, capsys):
    def run(arguments):
        try:
            raise RuntimeError("size mismatch for encoder")
        except RuntimeError:
            raise Exception("Cannot load model parameters from checkpoint x") from None

    command(run)
    assert cli.main(["user-dir"]) == 2
    assert "checkpoint x (size mismatch for encoder)" in capsys.readouterr().err


@pytest.mark.parametrize("error", [TypeError("a bug"), RuntimeError("a bug"), AssertionError()])
def test_bugs_keep_their_traceback(command, error):
    command(raising(error))
    with pytest.raises(type(error)):
        cli.main(["user-dir"])


def test_traceback_on_demand(command):
    command(raising(ValueError("3 is odd")))
    with pytest.raises(ValueError, match="odd"):
        cli.main(["--traceback", "user-dir"])


@pytest.mark.parametrize(
    ("statement", "status", "message"),
    [
        (
            "assert 1 > 2, '--temperature must be greater than 0'",
            2,
            "error: --temperature must be greater than 0",
        ),
        ("raise ImportError('Please install apex')", 2, "error: Please install apex"),
        ("raise NotImplementedError('Unknown option: x')", 2, "error: Unknown option: x"),
        (
            "raise KeyError('history')",
            1,
            "error: fairseq failed (KeyError: 'history'); check the options",
        ),
        (
            "import ast; ast.literal_eval('(1,')",
            1,
            "error: fairseq failed (SyntaxError: '(' was never closed",
        ),
        ("1 / 0", 1, "error: fairseq failed (ZeroDivisionError: division by zero); check"),
    ],
)
def test_what_fairseq_fails_on_is_told_in_one_line(command, capsys, statement, status, message):
    module = {"__name__": "fairseq.search"}
    exec(f"def fail(arguments):\n    {statement}", module)
    command(module["fail"])
    assert cli.main(["user-dir"]) == status
    printed = capsys.readouterr().err
    assert printed.startswith(f"lsq user-dir: {message}") and printed.count("\n") == 1
    with pytest.raises(Exception):  # noqa: B017  whatever it was
        cli.main(["--traceback", "user-dir"])


def test_an_assertion_of_fairseqs_without_words_is_shown_itself(command, capsys):
    command(lambda arguments: checkpoint_utils.load_model_ensemble_and_task(["x"], num_shards=0))
    assert cli.main(["user-dir"]) == 2
    assert capsys.readouterr().err == "lsq user-dir: error: assert num_shards > 0\n"
