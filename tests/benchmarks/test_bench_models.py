"""Sides of bench_models train the same models: from the same weights they come to nearly the same
losses."""

import argparse
import json
import sys

import bench_models
import model_sides
import pytest
import torch
from bench_linear import Conv1D
from model_sides import RECIPES, is_conv1d, sharing, with_adapters, with_linears

from tests.sampling import first

FLOAT = "PyTorch float32"
SIDES = [FLOAT, "PyTorch autocast", "PyTorch bfloat16", "torchao int8 bfloat16"]
SIDES += [f"lsq linears {name}" for name in model_sides.ALL]


def rows(tmp_path, *arguments: str) -> list[dict]:
    """What the benchmark writes of a quick run."""
    written = tmp_path / "figures.json"
    bench_models.main(["--quick", "--threads", "1", "--json", str(written), *arguments])
    return json.loads(written.read_text())["rows"]


@pytest.fixture(autouse=True)
def threads():
    """As many threads as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", first(RECIPES, 0, 2))
@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
def test_sides_agree_and_are_drawn(name, tmp_path):
    pytest.importorskip("transformers")
    picture = tmp_path / "models.png"
    found = rows(tmp_path, "--models", name, "--sides", *SIDES, "--picture", str(picture))
    assert {row["side"] for row in found} == set(SIDES)
    # where it is not installed
    assert all(row["side"].startswith("torchao") for row in found if row["failed"])
    losses = {row["side"]: row["loss"] for row in found if row["failed"] is None}
    assert losses == pytest.approx(dict.fromkeys(losses, losses[FLOAT]), rel=0.05)
    for row in found:
        if row["failed"] is None:
            assert row["seconds"] >= row["fastest"] > 0
            assert all(row[name] > 0 for name in ("ratio", "saved_bytes", "saved_ratio"))
            assert row["peak_bytes"] >= 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_transformers_every_row_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = rows(tmp_path, "--models", "gpt2", "bert", "--sides", "PyTorch*")
    assert len(found) == 2 * 5
    assert all("transformers" in row["failed"] and row["seconds"] is None for row in found)
    with pytest.raises(ValueError, match="needs a side that ran"):
        bench_models.draw(found, tmp_path / "models.png")
    assert not (tmp_path / "models.png").exists()


def test_a_side_that_fails_has_a_row_with_its_reason(tmp_path, monkeypatch):
    pytest.importorskip("transformers")

    def fails(model):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setitem(bench_models.SIDES, "torchao int8 bfloat16", model_sides.Kind(change=fails))
    sides = "torchao int8 bfloat16", "PyTorch bfloat16"
    ran, failed = rows(tmp_path, "--models", "llama", "--sides", *sides)
    assert (ran["side"], ran["failed"], ran["ratio"]) == ("PyTorch bfloat16", None, 1)
    assert failed["failed"] == "RuntimeError: first line" and failed["seconds"] is None


def test_a_pattern_that_fits_no_side_is_named(capsys):
    with pytest.raises(argparse.ArgumentTypeError, match="no side is called 'jax'"):
        bench_models.fitting("jax")
    with pytest.raises(SystemExit):
        bench_models.main(["--sides", "jax"])
    assert "'jax'" in capsys.readouterr().err


def test_linears_for_conv1d_compute_the_same():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), Conv1D(3, 5), torch.nn.ReLU())
    other = with_linears(sharing(model))
    x = torch.randn(7, 4)
    torch.testing.assert_close(other(x), model(x))
    assert not any(map(is_conv1d, other.modules())) and is_conv1d(model[1])
    assert other[0].weight is model[0].weight


def test_sides_take_turns_with_one_set_of_weights_unless_lsq_owns_them():
    bases = model_sides.Bases(torch.nn.Sequential(torch.nn.Linear(64, 64)))
    first, shared = bases.copied(model_sides.Kind())
    second, again = bases.copied(model_sides.Kind(linears=True))
    own, none = bases.copied(model_sides.Kind(own=True))
    assert first is not second and first[0].weight is second[0].weight and shared is again
    assert own[0].weight is not first[0].weight and none is None
    half, other = bases.copied(model_sides.Kind(dtype=torch.bfloat16))
    assert half[0].weight.dtype is torch.bfloat16 and other is not shared
    assert first[0].weight.dtype is torch.float32


def test_resident_peak_counts_what_a_run_took():
    if not bench_models.platform.system() == "Linux":
        pytest.skip("counted by Linux")
    size = 64 * 2**20
    assert bench_models.peak_resident(lambda: torch.ones(size, dtype=torch.int8)) > 0.9 * size
    assert bench_models.peak_resident(lambda: None) < 0.1 * size


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_alone_are_trained(tmp_path):
    pytest.importorskip("peft")
    kinds = FLOAT, "PyTorch bfloat16", "lsq linears float32", "lsq fused float32"
    given = rows(tmp_path, "--models", "llama", "--lora", "4", "--sides", *kinds)
    found = {row["side"]: row for row in given}
    losses = {name: row["loss"] for name, row in found.items()}
    assert losses == pytest.approx(dict.fromkeys(kinds, losses[FLOAT]), rel=0.05)
    assert found["lsq fused float32"]["saved_bytes"] < found[FLOAT]["saved_bytes"]
    model = with_adapters(RECIPES["llama"].make(1, True), 4)
    assert all("lora_" in name for name, one in model.named_parameters() if one.requires_grad)
    assert sum(name.endswith("base_layer.weight") for name, _ in model.named_parameters()) == 7
