import json

import pytest

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 144,
}


@pytest.fixture
def folder(tmp_path):
    transformers.LlamaConfig(**SIZES, max_position_embeddings=64).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.thorough
def test_ways_and_a_budget(folder, tmp_path, lsq):
    picture = tmp_path / "memory.svg"
    words = ["plan", "--model", folder, "--batch", "2x33", "--budget", "1GB", "--plot", picture]
    status, printed, said = lsq(*words, "--quiet")
    assert (status, said) == (0, "")
    lines = printed.splitlines()
    assert lines[0] == "0 million parameters, 2 x 33 tokens"
    assert sum(line.endswith("fits") for line in lines) == 6
    assert any("LsqConfig(remainder=True)" in line for line in lines)
    assert "checkpoint_layers" not in printed and "offload(" not in printed
    assert "at the peak: " in printed
    assert "<svg" in picture.read_text()


@pytest.mark.thorough
def test_the_first_way_that_fits(folder, lsq):
    _, printed, _ = lsq("plan", "--model", folder / "config.json", "--batch", "2x33", "--quiet")
    rows = [line.rsplit("  ", 1) for line in printed.splitlines()[1:7]]
    peaks = {name.strip(): float(size.split()[0]) for name, size in rows}
    assert "to train so" not in printed
    wanted = peaks["codes, layers computed again, offload"] + 0.0005
    words = ["plan", "--model", folder, "--batch", "2x33", "--budget", f"{wanted}MB", "--quiet"]
    status, printed, _ = lsq(*words)
    assert status == 0
    assert ".offload(" in printed


def test_nothing_fits(folder, lsq):
    words = ["plan", "--model", folder, "--batch", "2x33", "--budget", "1kB", "--quiet"]
    status, printed, _ = lsq(*words)
    assert status == 1
    assert "nothing fits into 0.001 MB; the least is" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    (
        (("--batch", "2"), "'2' is no batch; give sequences x tokens, as 4x2048"),
        (("--batch", "0x8"), "no batch"),
        (("--batch", "2x8", "--budget", "much"), "no number of bytes above 0"),
        (("--batch", "2x65"), "sequences of 65 tokens, and the model takes 64"),
        (("--batch", "2x8", "--plot", "none/a.png"), "there is no folder"),
        (("--batch", "2x8", "--plot", "a.xyz"), "--plot a.xyz: a picture is a .png, .svg or .pdf"),
        ((), "the following arguments are required: --batch"),
    ),
)
def test_mistakes(words, message, folder, lsq):
    status, _, said = lsq("plan", "--model", folder, *words)
    assert status != 0
    assert message in said


def test_other_models(tmp_path, lsq):
    status, _, said = lsq("plan", "--model", tmp_path / "none", "--batch", "2x8")
    assert status != 0 and "is not there" in said
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    status, _, said = lsq("plan", "--model", tmp_path, "--batch", "2x8", "--quiet")
    assert status != 0 and "a t5 is no causal language model" in said
    experts = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2)
    experts.save_pretrained(tmp_path)
    status, _, said = lsq("plan", "--model", tmp_path, "--batch", "2x8", "--quiet")
    assert status != 0 and "a step of a mixtral does not run on shapes alone" in said
    (tmp_path / "config.json").write_text("{}")
    status, _, said = lsq("plan", "--model", tmp_path, "--batch", "2x8", "--quiet")
    assert status != 0 and "has no configuration of transformers" in said
