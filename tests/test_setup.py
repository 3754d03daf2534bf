"""The C++ build: what it makes, what it rebuilds, and that an installation survives a missing
compiler."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lsq
from lsq.native import sources

ROOT = Path(__file__).resolve().parents[1]
SOURCE = 'extern "C" int answer() { return %d; }\n'

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def build(monkeypatch):
    """The functions of setup.py, without running an installation."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("CXX", raising=False)
    spec = importlib.util.spec_from_file_location("lsq_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE % 42)
    return path


@needs_compiler
def test_library_is_loadable(build, source, tmp_path):
    target = tmp_path / "out" / "libanswer.so"
    build.build_library(target, [], tmp_path / "objects", [str(source)])
    assert ctypes.CDLL(str(target)).answer() == 42
    assert not target.with_suffix(".partial").exists()
    assert sources.unsealed(target.read_bytes())


@pytest.fixture
def checkout(build, tmp_path, monkeypatch):
    """A folder of two sources and a header, from which build_library makes libanswer.so; returns
    that call."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(build, "HEADERS", ["answer.h"])
    Path("answer.cpp").write_text(SOURCE % 42)
    Path("other.cpp").write_text('extern "C" int other() { return 1; }\n')
    Path("answer.h").write_text("")
    return lambda *flags: build.build_library(
        Path("libanswer.so"), list(flags), Path("objects"), ["answer.cpp", "other.cpp"]
    )


def made() -> tuple[int, int, int]:
    """When the library and the only objects of answer.cpp and other.cpp in this folder were
    made."""
    [answer], [other] = Path("objects").glob("answer.*"), Path("objects").glob("other.*")
    return tuple(path.stat().st_mtime_ns for path in (Path("libanswer.so"), answer, other))


def rebuilt(checkout, *flags: str) -> list[bool]:
    """Which of the three a build makes anew."""
    before = made()
    checkout(*flags)
    return [now != then for now, then in zip(made(), before, strict=True)]


@needs_compiler
def test_only_what_changed_is_rebuilt(checkout):
    checkout()
    for path in Path().iterdir():
        path.touch()
    assert rebuilt(checkout) == [False, False, False]
    Path("answer.cpp").write_text(SOURCE % 43)
    os.utime("answer.cpp", (0, 0))
    assert rebuilt(checkout) == [True, True, False]
    assert ctypes.CDLL(os.path.abspath("libanswer.so")).answer() == 43


@needs_compiler
def test_a_changed_header_rebuilds(checkout):
    checkout()
    Path("answer.h").write_text("// more\n")
    os.utime("answer.h", (0, 0))
    assert rebuilt(checkout) == [True, True, True]


@needs_compiler
def test_other_flags_and_another_compiler_rebuild(checkout, monkeypatch):
    checkout()
    assert rebuilt(checkout, "-DANSWER") == [True, True, True]
    assert rebuilt(checkout, "-DANSWER") == [False, False, False]
    monkeypatch.setenv("CXX", "g++ -g0")
    assert rebuilt(checkout, "-DANSWER") == [True, True, True]


@needs_compiler
def test_what_was_copied_is_taken_for_what_it_is(checkout, monkeypatch):
    """Newer objects and a newer library of another checkout are made anew where its sources were
    others, else kept."""
    checkout()
    shutil.copytree(Path(), "../same")
    shutil.copytree(Path(), "../copy")
    monkeypatch.chdir("../same")
    assert rebuilt(checkout) == [False, False, False]
    monkeypatch.chdir("../copy")
    Path("answer.cpp").write_text(SOURCE % 43)
    os.utime("answer.cpp", (0, 0))
    assert rebuilt(checkout) == [True, True, False]
    assert ctypes.CDLL(os.path.abspath("libanswer.so")).answer() == 43


@needs_compiler
def test_a_damaged_library_is_linked_again(checkout):
    checkout()
    content = Path("libanswer.so").read_bytes()
    Path("libanswer.so").write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    assert rebuilt(checkout) == [True, False, False]
    assert Path("libanswer.so").read_bytes() == content


@needs_compiler
def test_a_failed_build_leaves_no_outdated_library(build, source, tmp_path):
    target = tmp_path / "libanswer.so"
    target.write_bytes(b"outdated")
    source.write_text("this is not C++")
    with pytest.raises(RuntimeError, match=r"answer\.cpp.*error"):
        build.build_library(target, [], tmp_path / "objects", [str(source)])
    assert not target.exists()


def test_missing_compiler_is_named(build, source, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/compiler -v")
    with pytest.raises(RuntimeError, match="'/nonexistent/compiler' cannot be run"):
        build.build_library(tmp_path / "libanswer.so", [], tmp_path / "objects", [str(source)])


def test_installation_goes_on_without_a_compiler(tmp_path):
    result = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext"]
        + ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")],
        cwd=ROOT,
        env=os.environ | {"CXX": "/nonexistent/compiler"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "libcpu_v1.so was not built" in result.stderr
    assert "'/nonexistent/compiler' cannot be run" in result.stderr
    assert "apt install g++" in result.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_levels_round_alike(build):
    """Fused multiply-adds would round differently on each level."""
    assert "-ffp-contract=off" in build.COMPILE_FLAGS
    assert "libcpu_v1" in build.LEVELS
    assert not any("fast-math" in flag for flags in build.LEVELS.values() for flag in flags)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel with the libraries of the checkout, which are current; nothing is compiled."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "lib/lsq/native").mkdir(parents=True)
    for library in ROOT.glob("lsq/native/*.so"):
        shutil.copy(library, folder / "lib/lsq/native")
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", folder]
    command += ["build", "--build-lib", folder / "lib", "--build-temp", folder / "temp"]
    command += ["bdist_wheel", "--bdist-dir", folder / "wheel", "--dist-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "compiling" not in done.stdout, done.stderr
    [path] = folder.glob("*.whl")
    return path


@needs_compiler
def test_a_wheel_fits_every_python_and_has_all_libraries_and_sources(build, wheel):
    assert wheel.name.startswith(f"lsq_int8-{lsq.__version__}-py3-none-linux_")
    kinds = (".py", ".h", ".cu", ".cuh", ".cpp", ".json", ".html")
    wanted = {str(path) for path in Path("lsq").rglob("*") if path.suffix in kinds}
    libraries = [f"lsq/native/{name}.so" for name in build.LIBRARIES]
    with zipfile.ZipFile(wheel) as content:
        assert set(content.namelist()) >= {*libraries, *wanted}
        assert all(content.read(library) == Path(library).read_bytes() for library in libraries)


REQUIRED = (
    *("torch", "torchgen", "functorch", "numpy", "numpy.libs", "safetensors", "filelock", "tqdm"),
    *("sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "typing_extensions.py"),
    *("setuptools", "_distutils_hack"),
)
"""lsq's required packages, and what PyTorch requires, in a folder of packages."""
STEP = """
import sys, torch, lsq
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
assert str(lsq.convert(model)).startswith("2 of 2 linear layers run in int8"), lsq.__file__
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
before = model[0].weight.detach().clone()
model(torch.randn(32, 64)).square().mean().backward()
optimizer.step()
assert not torch.equal(model[0].weight, before)
lsq.monitor(model)
lsq.revert(model)
from lsq import dist, models, optim
from lsq.native import loader
print(loader.description())
print(lsq.__file__)
"""


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Callable[..., subprocess.CompletedProcess]:
    """installed(*arguments): runs Python in an empty environment, which has the wheel and what lsq
    requires, in an empty folder."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    [packages] = folder.glob("venv/lib/python*/site-packages")
    here = Path(torch.__file__).parents[1]
    for name in REQUIRED:
        (packages / name).symlink_to(here / name)
    with zipfile.ZipFile(wheel) as content:
        content.extractall(packages)
    (folder / "empty").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [folder / "venv/bin/python", *arguments],
            cwd=folder / "empty",
            env=environment,
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.thorough
@needs_compiler
def test_a_wheel_alone_converts_and_trains(installed):
    done = installed("-c", STEP)
    assert done.returncode == 0, done.stderr
    library, file = done.stdout.splitlines()[-2:]
    assert "C++" in library and "site-packages" in file
    for command in (["-m", "lsq", "user-dir"], ["-m", "lsq", "plan", "--help"]):
        assert installed(*command).returncode == 0
    done = installed("-m", "lsq", "numbers")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "lsq numbers: error: this command needs fairseq-fixed, sacrebleu, sentencepiece, num2words,"
        " matplotlib, tabulate, tensorboard, scipy, which are not installed: pip install "
    )
    done = installed("-c", "import lsq; lsq.Translator('x.safetensors')")
    assert "FileNotFoundError" in done.stderr
    table = "from lsq.study.tables import fitted; fitted([], [], [])"
    assert "needs matplotlib, tabulate" in installed("-c", table).stderr
    callback = "from lsq.models import LsqCallback"
    assert "LsqCallback needs transformers, accelerate" in installed("-c", callback).stderr


@pytest.mark.thorough
@needs_compiler
def test_a_wheel_alone_emulates_kernels(installed):
    """Headers and kernels are inside."""
    code = "from lsq.run.backends import backend; print(backend('emulated').name)"
    done = installed("-c", code)
    assert done.returncode == 0, done.stderr
