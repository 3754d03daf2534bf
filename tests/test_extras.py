"""Extras: what messages and pages tell people to install is there, and is lsq."""

import json
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from lsq import commands, extras

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL = PROJECT["optional-dependencies"]
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


def packages(lines: list[str]) -> list[str]:
    return [re.match(r"[\w-]+", line)[0] for line in lines]


def test_packages_are_those_of_pyproject():
    assert PROJECT["name"] == extras.DISTRIBUTION
    assert packages(PROJECT["dependencies"]) == list(extras.REQUIRED)
    itself, *others = OPTIONAL["dev"]
    assert {name: packages(lines) for name, lines in OPTIONAL.items() if name != "dev"} == {
        name: list(extra.packages) for name, extra in extras.EXTRAS.items()
    }
    included = set(itself.removeprefix(extras.DISTRIBUTION).strip("[]").split(","))
    assert included <= set(OPTIONAL)
    left_out = {name for extra in OPTIONAL.keys() - included - {"dev"} for name in OPTIONAL[extra]}
    assert set(packages(left_out)) - set(packages(others)) == {"nvidia-cublas"}


def test_require_names_all_that_is_missing(monkeypatch):
    extras.require("nothing", *extras.EXTRAS.keys() - {"cuda13"})
    for module in ("sacrebleu", "num2words", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(extras.MissingPackage) as raised:
        extras.require("lsq numbers", "fairseq", "text", "study")
    assert str(raised.value) == (
        "lsq numbers needs sacrebleu, num2words, matplotlib, which are not installed: "
        + extras.command("text", "study")
    )


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("fairseq_cli.train", "fairseq-fixed", "fairseq"),
        ("omegaconf", "fairseq-fixed", "fairseq"),
        ("hydra.core", "fairseq-fixed", "fairseq"),
        ("uvicorn", "uvicorn", "serve"),
        ("prometheus_client", "prometheus-client", "serve"),
        ("transformers", "transformers", "huggingface"),
        ("tensorboard.compat", "tensorboard", "study"),
        ("num2words", "num2words", "text"),
        ("ctranslate2", "ctranslate2", "ctranslate2"),
        ("torch_geometric.nn", "torch_geometric", "graphs"),
        ("nvidia.cu13", "cuda-bindings", "cuda13"),
        ("peft.utils", "peft", None),
    ],
)
def test_a_failed_import_is_explained(module, package, extra):
    remedy = extras.command(extra) if extra else f"pip install {package}"
    assert extras.explanation(module) == f"{package}, which is not installed: {remedy}"


def test_nothing_installs_the_package_that_has_lsqs_name_on_pypi():
    found = [
        str(path)
        for path, text in texts().items()
        if re.search(r"\blsq\[\w|pip install (-\S+ )*'?lsq\b", text)
    ]
    assert not found


def test_calls_name_extras_that_exist():
    code = "".join(text for path, text in texts().items() if path.is_relative_to(ROOT / "lsq"))
    named = re.findall(r"extras\.(?:command\(|require\([^,]*,)([^)]*)\)", code)
    names = [name for arguments in named for name in re.findall(r"['\"](\w+)['\"]", arguments)]
    assert {"cuda13", "study", "text", "ctranslate2"} <= set(names) <= set(extras.EXTRAS)
    assert {name for needed in commands.EXTRAS.values() for name in needed} <= set(extras.EXTRAS)
    assert commands.EXTRAS.keys() <= commands.COMMANDS.keys()


def test_pages_name_extras_that_exist():
    named = re.findall(r"pip install (?:-\S+ )*['\"]\.\[([\w,]+)\]", "".join(texts().values()))
    assert named and {name for names in named for name in names.split(",")} <= set(OPTIONAL)
