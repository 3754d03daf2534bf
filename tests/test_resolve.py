"""The check that the requirements resolve with PyTorch's standard build: it fails where it cannot
tell."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

from prerequisites import TRIED

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def resolve(monkeypatch):
    """.ci/resolve.py as a module, called without arguments."""
    spec = importlib.util.spec_from_file_location("resolve", ROOT / ".ci" / "resolve.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("sys.argv", ["resolve.py"])
    return module


@pytest.fixture
def answers(monkeypatch, resolve):
    """answers(lines, status): what uv says from now on; returns the list of the commands that it is
    given."""

    def answers(lines: str, status: int = 0) -> list[list[str]]:
        given = []

        def run(command, **_) -> subprocess.CompletedProcess:
            given.append(command)
            return subprocess.CompletedProcess(command, status, stdout=lines, stderr="no solution")

        monkeypatch.setattr(resolve, "index", lambda: None)
        monkeypatch.setattr(resolve.subprocess, "run", run)
        return given

    return answers


def test_every_python_is_resolved(resolve, answers, capsys):
    given = answers("cuda-toolkit==13.0.3\ntorch==2.13.0\n")
    assert resolve.main() == 0
    versions = ["{}.{}".format(*version) for version in TRIED]
    assert [command[command.index("--python-version") + 1] for command in given] == versions
    assert capsys.readouterr().out.splitlines() == [
        f"Python {version}: 2 packages" for version in versions
    ]


def test_a_cpu_build_tells_nothing(resolve, answers, capsys):
    answers("torch==2.13.0\n")
    assert resolve.main() == 1
    assert "the index has not PyTorch's standard build for Python 3.11" in capsys.readouterr().err


def test_the_resolvers_words_are_shown(resolve, answers, capsys):
    answers("", status=1)
    assert resolve.main() == 1
    assert capsys.readouterr().err == (
        "resolve.py: error: the requirements do not resolve for Python 3.11:\nno solution\n"
    )


def test_no_index_is_an_error(resolve, monkeypatch, capsys):
    """uv itself, which may not use the network; there is no cache that it could take."""
    monkeypatch.setenv("UV_OFFLINE", "1")
    assert resolve.main() == 1
    assert "the requirements do not resolve for Python 3.11" in capsys.readouterr().err


def test_the_index_is_pips(resolve, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    assert resolve.index() == "https://index.example/simple"
