"""Extras: what messages and pages tell people to install is there, and is lsq."""

import json
import re
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from lsq import extras

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
PLACES = ("lsq", "tests", "docs", "benchmarks", "examples", "recipes", ".ci")
TEXTS = {".py", ".md", ".toml", ".sh", ".txt", ".html", ".cpp", ".h", ".cu", ".cuh", ""}


def texts() -> dict[Path, str]:
    """What is written in the repository, without what was built."""
    paths = [*ROOT.glob("*"), *(path for place in PLACES for path in (ROOT / place).rglob("*"))]
    return {
        path: path.read_text(encoding="utf-8")
        for path in paths
        if path.is_file() and path.suffix in TEXTS
    }


@pytest.mark.parametrize(
    ("record", "command"),
    [
        ({"url": "file:///my%20checkout", "dir_info": {}}, "pip install '/my checkout[serve]'"),
        (
            {"url": "file:///src", "dir_info": {"editable": True}},
            "pip install --no-build-isolation --editable '/src[serve]'",
        ),
        (
            {"url": "file:///a/lsq_int8-1-py3.whl", "archive_info": {}},
            "pip install '/a/lsq_int8-1-py3.whl[serve]'",
        ),
        (None, "pip install '.[serve]'"),
    ],
)
def test_the_command_installs_again_what_was_installed(monkeypatch, record, command):
    found = [
        SimpleNamespace(read_text=lambda name, text=text: text)
        for text in (None, record and json.dumps(record))
    ]
    monkeypatch.setattr(metadata, "distributions", lambda name: found)
    assert extras.command("serve") == command


def test_without_an_installation_it_is_for_the_checkout(monkeypatch):
    monkeypatch.setattr(extras, "DISTRIBUTION", "no-such-package-of-this-name")
    assert extras.command("serve") == "pip install '.[serve]'"


def test_the_name_is_the_projects():
    assert PROJECT["name"] == extras.DISTRIBUTION
    [itself] = [
        one
        for one in PROJECT["optional-dependencies"]["dev"]
        if one.startswith(extras.DISTRIBUTION)
    ]
    assert set(re.findall(r"\w+", itself.removeprefix(extras.DISTRIBUTION))) <= EXTRAS


def test_nothing_installs_the_package_that_has_lsqs_name_on_pypi():
    found = [
        str(path)
        for path, text in texts().items()
        if re.search(r"\blsq\[\w|pip install (-\S+ )*'?lsq\b", text)
    ]
    assert not found


def test_messages_name_extras_that_exist():
    code = "".join(text for path, text in texts().items() if path.is_relative_to(ROOT / "lsq"))
    named = re.findall(r"extras\.command\('(\w+)'\)", code)
    assert named and len(named) == code.count("extras.command(")
    assert {*named, *extras.OF_MODULES.values()} <= EXTRAS


def test_pages_name_extras_that_exist():
    named = re.findall(r"pip install (?:-\S+ )*['\"]\.\[([\w,]+)\]", "".join(texts().values()))
    assert named and {name for names in named for name in names.split(",")} <= EXTRAS
