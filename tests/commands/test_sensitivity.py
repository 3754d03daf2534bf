"""`lsq sensitivity`: of a run, stopped and gone on with; what is written, and what is refused."""

import contextlib
import json
import math
import os
import signal

import pytest
import torch

from lsq.commands import sensitivity
from lsq.commands.sensitivity import by_length
from lsq.study import read_costs
from tests.commands.test_model_batch import folder, texts, transformers  # noqa: F401

FORMATS = ["--formats", "int8/row", "int2/row"]
FEW = [*FORMATS, "--words", "40", "--tensors", "*fc1_weight", "*embed_tokens*"]


@pytest.fixture
def lsq_sensitivity(lsq, tmp_path, monkeypatch):
    savefig = "matplotlib.figure.Figure.savefig"
    monkeypatch.setattr(savefig, lambda figure, file, **_: file.write(b""))
    given = ["--output", tmp_path / "out", "--quiet"]
    return lambda model, *options: lsq("sensitivity", "--model", model, *given, *options)


@pytest.mark.thorough
def test_a_run(lsq_sensitivity, output, tmp_path):
    """All of its validation data have the loss that the training reported."""
    status, said, _ = lsq_sensitivity(output, *FORMATS)
    assert status == 0 and "12 sentences" in said and "Rank correlation of costs" in said
    assert "no activations: layers of lsq round theirs" in said
    written = tmp_path / "out"
    assert {path.name for path in written.iterdir()} >= set(sensitivity.OUTPUTS)
    costs = read_costs(written / sensitivity.JSON)
    results = json.loads((output / "int8" / "results.json").read_text())
    bits = costs.loss / math.log(2)
    # which fairseq rounds to three digits
    assert bits == pytest.approx(results["best_validation_loss"], abs=2e-3)
    assert costs.finished and costs.samples == 12 and len(costs.tensors) > 8
    assert costs.about["loss"] == "nats per word" and costs.about["model"] == str(output)
    found = [tensor.formats["int2/row"].cost for tensor in costs.tensors]
    assert max(found) > 10 * max(abs(tensor.formats["int8/row"].cost) for tensor in costs.tensors)
    divergences = [tensor.formats["int2/row"].divergence for tensor in costs.tensors]
    assert min(divergences) > 0  # products of lsq's layers are not seen, but predictions are
    assert "| encoder.embed_tokens.weight " in (written / sensitivity.TABLE).read_text()


def test_a_folder_of_transformers(lsq_sensitivity, folder, texts, tmp_path):  # noqa: F811
    """GPT-2's weights lie as [inputs, outputs]."""
    sizes = {"vocab_size": 40, "n_embd": 32, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)
    model = folder(transformers.GPT2LMHeadModel(config))
    given = ["--text", texts[0], "--words", "40", *FORMATS, "--tensors", "*mlp*", "*wte*"]
    status, said, _ = lsq_sensitivity(model, *given)
    assert status == 0 and f"words of {texts[0]}" in said
    tensors = read_costs(tmp_path / "out" / sensitivity.JSON).tensors
    assert [(one.name.split(".")[-2], one.kind, one.transposed) for one in tensors] == [
        (name, kind, name != "wte")
        for kind in ("weight", "activation")
        for name in ("wte", "c_fc", "c_proj")
    ]


@pytest.mark.thorough
def test_a_stopped_command_goes_on(lsq_sensitivity, output, tmp_path, monkeypatch):
    """Nothing is lost, also of a command that begins anew, before something is measured."""

    def stopped(number: int, *options: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(sensitivity, "_progress", _stopping(number))
            status, _, said = lsq_sensitivity(output, *FEW, *options)
        assert status == 128 + number
        return said

    path = tmp_path / "out" / sensitivity.JSON
    assert lsq_sensitivity(output, *FEW)[0] == 0
    whole, content = read_costs(path), path.read_bytes()
    path.unlink()
    for number in (signal.SIGINT, signal.SIGTERM):
        assert stopped(number).endswith("; the same command goes on from there\n")
    assert len(read_costs(path).tensors) == 2 and not read_costs(path).finished
    assert lsq_sensitivity(output, *FEW)[0] == 0
    assert read_costs(path) == whole and path.read_bytes() == content
    status, _, said = lsq_sensitivity(output, *FEW, "--clip", "absmax")
    assert status == 2 and "is of other settings (clip: mse before, absmax now)" in said
    for wrong in (["--formats", "int99"], ["--tensors", "nothing"]):
        assert lsq_sensitivity(output, *FEW, "--overwrite", *wrong)[0] == 2
        assert path.read_bytes() == content
    advice = "; the same command without --overwrite goes on"
    assert advice in stopped(signal.SIGTERM, "--overwrite", "--clip", "absmax")
    assert len(read_costs(path).tensors) == 1 and read_costs(path).clip == "absmax"
    assert lsq_sensitivity(output, *FEW, "--overwrite")[0] == 0
    assert path.read_bytes() == content


def _stopping(number: int):
    """`_progress` under which a signal comes after the first tensor."""

    @contextlib.contextmanager
    def progress(quiet):
        yield lambda done, wanted, name: os.kill(os.getpid(), number)

    return progress


def test_mistakes_are_told_in_a_line(lsq_sensitivity, output, tmp_path):
    (tmp_path / "file").touch()
    for message, model, *options in (
        ("none is not there; check the path", tmp_path / "none"),
        ("is a file; give a folder", output, "--output", tmp_path / "file"),
        ("--text is for a folder of transformers'", output, "--text", tmp_path / "file"),
        ("group33x", output, "--formats", "int4/group33x"),
        ("no tensor is called 'nothing'", output, "--tensors", "nothing"),
    ):
        status, _, said = lsq_sensitivity(model, *options)
        assert status == 2 and message in said and said.count("\n") == 1, said


def test_batches_are_of_like_length():
    lengths = [3, 9, 4, 9, 2, 30]
    found = by_length(lengths, 18)
    assert found == [[5], [1, 3], [2, 0, 4]]
    assert by_length([], 18) == []
    assert sorted(sum(by_length(torch.arange(1, 50).tolist(), 64), [])) == list(range(49))
