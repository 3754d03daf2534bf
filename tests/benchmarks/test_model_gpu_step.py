"""The model runs from counting to the picture, on tiny shapes."""

import json
import shutil

import gpu_lists
import model_gpu_step
import pytest
from model_gpu_step import MODELS, QUANT

from lsq.native import compiler
from lsq.native.launch import Launch


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("objdump") is None, reason="kernels are counted in the emulator")
def test_quick_run(tmp_path, capsys):
    try:
        compiler.version()
    except RuntimeError as error:
        pytest.skip(str(error))
    written, picture = tmp_path / "step.json", tmp_path / "step.png"
    assert model_gpu_step.main(["--quick", "--json", str(written), "--picture", str(picture)]) == 0
    found = json.loads(written.read_text())
    assert {row["side"] for row in found["rows"]} == {"compiled", "int8", "lsq"}
    for row in found["rows"]:
        assert row["with_luck"] <= row["modelled_milliseconds"] <= row["without"]
    assert picture.stat().st_size > 1000
    assert "modelled" in capsys.readouterr().out


@pytest.fixture(scope="module")
def counts():
    """What was counted, and is kept."""
    return model_gpu_step.load(model_gpu_step.COUNTS)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", MODELS, ids=lambda size: size.name)
def test_every_kernel_of_a_step_was_counted(counts, size, transposed):
    with gpu_lists.transposed_weights(transposed):
        entries = [entry for part in gpu_lists.step(size, QUANT) for entry in part.entries]
    keys = {gpu_lists.key_of(entry) for entry in entries if isinstance(entry, Launch)}
    assert keys <= counts.keys(), "lists have changed: run benchmarks/model_gpu_step.py --count"


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_command_of_the_page_runs(capsys):
    try:
        compiler.version()
    except RuntimeError as error:
        pytest.skip(str(error))
    assert model_gpu_step.main([]) == 0
    assert "H100 SXM" in capsys.readouterr().out


def test_the_page_has_the_table_of_the_figures():
    results = json.loads(model_gpu_step.RESULTS.read_text(encoding="utf-8"))["kernels_by_gpu"]
    page = (model_gpu_step.ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    assert model_gpu_step.page_table(results) in page


@pytest.mark.parametrize(("time", "text"), [(9.94, "9.9"), (9.96, "10"), (99.6, "100")])
def test_milliseconds_as_the_page_has_them(time, text):
    assert model_gpu_step.rounded(time) == text


def test_assumptions_are_printed(capsys):
    assert model_gpu_step.main(["--assumptions"]) == 0
    assert "| int8_reached | 0.65" in capsys.readouterr().out


def test_counts_are_kept_and_found_again(counts, tmp_path):
    model_gpu_step.save(counts, tmp_path / "counts.json")
    assert model_gpu_step.load(tmp_path / "counts.json") == counts


def test_the_model_is_near_what_is_known():
    for check in model_gpu_step.checks():
        assert check["modelled"] == pytest.approx(check["measured"], rel=0.2), check["figure"]
