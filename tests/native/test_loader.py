"""Which library is found, that each of them computes the same, and what happens where there is
none."""

import ctypes
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lsq.layers import TransformerDecoderLayer, programs
from lsq.native import loader, sources
from lsq.program.samples import Sampler
from tests.layers.examples import SENTENCES, SOURCE, mode_on
from tests.layers.oracle import assert_same_codes, recorded
from tests.layers.shapes import config_of, gradients, padding_mask
from tests.ops.compare import compare

LEVELS = ("v4", "v3", "v1")
WORDS = 91, 48


def path_of(level):
    return Path(loader.__file__).parent / f"libcpu_{level}.so"


def runs_here(level):
    return path_of(level).exists() and loader._REQUIRED[level] <= loader.cpu_features()


@pytest.fixture
def use(monkeypatch):
    """use(library): from here on that is the library; the real one comes back after the test."""

    def use(library):
        monkeypatch.setattr(loader, "_load", lambda: library)
        loader.library.cache_clear()

    yield use
    loader.library.cache_clear()


def test_the_best_level_is_loaded():
    assert loader.available()
    best = next(level for level in LEVELS if runs_here(level))
    assert Path(loader.library()._name) == path_of(best)
    assert loader.description().startswith("C++ host library")


@pytest.mark.parametrize("level", ["v3", "v1"])
def test_a_lesser_processor_gets_a_lesser_library(monkeypatch, level):
    if not path_of(level).exists():
        pytest.skip(f"the library for x86-64-{level} is not built here")
    monkeypatch.setattr(loader, "cpu_features", lambda: frozenset(loader._REQUIRED[level]))
    assert Path(loader._load()._name) == path_of(level)


def test_a_library_of_other_sources_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    assert loader._load() is not None, "without sources there is nothing to compare with"
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "later.cpp").write_text("// another signature")
    with pytest.raises(
        RuntimeError, match=r"libcpu_v\d.so was built from other C\+\+ sources.*make library"
    ):
        loader._load()


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_computes_what_the_references_do(use, level):
    if not runs_here(level):
        pytest.skip(f"the library for x86-64-{level} is not built, or does not run here")
    use(ctypes.CDLL(str(path_of(level))))
    for options in (
        {"backward": "int8", "dropout": 0.2},
        {"clip_gradient": "lsq", "activation": "gelu"},
    ):
        config = config_of(**options)
        for program in (
            programs.decoder_layer(config, SENTENCES, SOURCE, mode_on("cpu")),
            programs.vocabulary_loss(
                config.quant, 41, *WORDS, mode_on("cpu"), padding=1, smoothing=0.1
            ),
        ):
            drawn = Sampler()
            for operation in program.operations:
                compare(drawn.operation(operation))


def run_layer(options):
    """(codes, gradients) of a decoder layer in training."""
    torch.manual_seed(0)
    layer = TransformerDecoderLayer(config_of(**options))
    x = torch.randn(7, 3, 48, requires_grad=True)
    memory = torch.randn(9, 3, 48, requires_grad=True)
    with recorded(layer) as outcome:
        output = layer(x, memory, padding_mask(3, 9))
    return outcome.codes, gradients(layer, output, x, memory)


@pytest.mark.parametrize("backward", ["float", "int8"])
def test_without_a_library_the_references_run(use, caplog, backward):
    options = {"dropout": 0.1, "backward": backward, "clip_init": "fixed"}
    codes, found = run_layer(options)
    use(None)
    with caplog.at_level(logging.WARNING):
        other_codes, other = run_layer(options)
        run_layer(options)
    warnings = [record.getMessage() for record in caplog.records if record.name == loader.__name__]
    assert len(warnings) == 1 and "g++" in warnings[0]
    assert not loader.available() and "plain PyTorch" in loader.description()
    assert_same_codes(other_codes, codes)
    for name, gradient in found.items():
        assert (other[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, name


def test_a_loop_that_nobody_wrote_is_named():
    with pytest.raises(
        sources.LibraryError, match="no lsq_round_pairs; write it in lsq/csrc/cpu, or take"
    ):
        loader.call("lsq_round_pairs")


@pytest.mark.thorough
@pytest.mark.skipif(not path_of("v1").exists(), reason="needs the C++ host library")
def test_the_library_shares_pytorchs_openmp():
    """A second runtime would have threads of its own.

    PyTorch's comes first, under the name that the library needs.
    """
    code = "from lsq.native import loader; loader.library(); print(open('/proc/self/maps').read())"
    maps = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    [found] = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line}
    assert Path(found).is_relative_to(Path(torch.__file__).parent)
