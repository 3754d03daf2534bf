"""The first steps of each example."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ["--steps", "2", "--rows", "4", "--hidden", "64", "--layers", "1"]


def needed(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def example(name: str, monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module(name)


def test_train_gpt(monkeypatch, capsys, tmp_path):
    train_gpt = example("train_gpt", monkeypatch)
    results = train_gpt.main([*SMALL, "--context", "32", "--float"])
    assert (
        results.keys() == {"bfloat16", "int8"} and abs(results["int8"] - results["bfloat16"]) < 0.1
    )
    assert "4 of 5 linear layers run in int8" in capsys.readouterr().out
    text = tmp_path / "text"
    text.write_text("short")
    with pytest.raises(SystemExit):
        train_gpt.main([str(text)])
    assert "the text has 5 letters; --context 128 needs" in capsys.readouterr().err


@pytest.mark.thorough
def test_classify(monkeypatch, capsys):
    needed("transformers", "accelerate")
    classify = example("classify", monkeypatch)
    monkeypatch.setattr(classify, "TESTED", 20)
    results = classify.main([*SMALL, "--float"])
    assert results.keys() == {"float32", "int8"}
    assert "finds" in capsys.readouterr().out


def test_lora(monkeypatch, capsys):
    needed("transformers", "peft")
    lora = example("lora", monkeypatch)
    results = lora.main([*SMALL, "--rank", "4", "--float"])
    assert results.keys() == {"float32", "int8"} and abs(results["int8"] - results["float32"]) < 0.2
    assert "before" in capsys.readouterr().out


def test_graphs(monkeypatch, capsys):
    needed("torch_geometric", "pymetis")
    graphs = example("graphs", monkeypatch)
    results = graphs.main(["--epochs", "60", "--float"])
    assert results.keys() == {"float32", "int8"} and all(one > 0.6 for one in results.values())
    printed = capsys.readouterr().out
    assert "3 of 3 linear layers run in int8" in printed and "finds the group of" in printed


@pytest.mark.thorough
def test_allocate(monkeypatch, capsys, tmp_path):
    needed("transformers", "scipy")
    allocate = example("allocate", monkeypatch)
    few = ["--context", "32", "--last", "2", "--mixes", "4", "--subwords", "300"]
    results = allocate.main([*SMALL, *few, "--bits", "4.8"])
    assert list(results) == ["float32", "int8", "int4/row", "int3/row", "mix of 4.8"]
    bits, divergence, loss, _ = results["mix of 4.8"]
    assert bits <= 4.8 and results["float32"][1] == 0
    assert 3 < results["int3/row"][0] < results["int4/row"][0] < results["int8"][0] < 9
    assert divergence < results["int3/row"][1] and abs(loss - results["float32"][2]) < 0.1
    assert "4 mixes" in capsys.readouterr().out
    text = tmp_path / "text"
    text.write_text("short")
    with pytest.raises(SystemExit):
        allocate.main([str(text)])
    assert "subwords; --context 128 needs more" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--no-remainder"], ["--offload", "{}"]])
def test_finetune_large(options, monkeypatch, capsys, tmp_path):
    needed("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes)).save_pretrained(
        tmp_path / "model"
    )
    text, output = tmp_path / "text", tmp_path / "trained"
    text.write_text("to be or not to be " * 40)
    finetune = example("finetune_large", monkeypatch)
    words = [str(tmp_path / "model"), str(text), str(output)]
    few = ["--updates", "30", "--lr", "0.003", "--length", "32"]
    options = [option.format(tmp_path) for option in options]
    begun = finetune.main([*words, *few, *options, "--updates", "20", "--every", "20"])
    shutil.rmtree(output)
    losses = finetune.main([*words, *few, *options])
    assert len(losses) == 10 and losses[-1] < 0.6 * begun[0]
    assert "bytes a parameter" in capsys.readouterr().out
    assert {one.dtype for one in load_file(output / "model.safetensors").values()} == {
        torch.bfloat16
    }
    assert {path.name for path in tmp_path.iterdir()} <= {
        *("model", "text", "trained", "trained.training")
    }
    LlamaForCausalLM.from_pretrained(output)
    for wrong, said in (
        (words, "exists; name another folder"),
        ([words[0], "no-text", "new"], "no-text is no file; check the path"),
        ([*words[:2], "new", "--offload", str(text)], "text is no folder; check the path"),
        ([*words[:2], "new", "--every", "0"], "must be 1 or more"),
    ):
        with pytest.raises(SystemExit):
            finetune.main(wrong)
        assert said in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_fsdp(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += [
        str(EXAMPLES / "fsdp.py"),
        *SMALL,
        "--context",
        "32",
        "--checkpoint",
        str(tmp_path),
        "--gradients",
    ]
    for words in (["--float"], ["--codes"]):
        run = subprocess.run([*command, *words], capture_output=True, text=True, timeout=140)
        assert run.returncode == 0, run.stderr
        assert "int8     loss" in run.stdout
        assert ("bfloat16 loss" in run.stdout) == ("--float" in words)
        assert ("trained weights are kept as codes" in run.stdout) == ("--codes" in words)
    assert {folder.name for folder in tmp_path.iterdir()} == {"bfloat16", "int8"}
