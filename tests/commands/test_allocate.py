"""`lsq allocate`: from measured costs to formats that convert a model; what is refused."""

import json

import pytest
import torch

import lsq as package
from lsq.commands import allocate
from lsq.config import QuantConfig
from lsq.study import KeptMixes, read_costs
from tests.commands.test_model_batch import folder, texts, transformers  # noqa: F401

SHAPE = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
FORMATS = ("int8/row", "int4/row", "int2/row")


@pytest.fixture
def measured(lsq, folder, texts, tmp_path, monkeypatch):  # noqa: F811
    """The folder of costs of a small Llama, and the model's."""
    savefig = "matplotlib.figure.Figure.savefig"
    monkeypatch.setattr(savefig, lambda figure, file, **_: file.write(b""))
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SHAPE, num_hidden_layers=1, tie_word_embeddings=False)
    model = folder(transformers.LlamaForCausalLM(config))
    given = ["--text", texts[0], "--words", "40", "--weights-only", "--quiet"]
    output = tmp_path / "costs"
    status, *_ = lsq(
        "sensitivity", "--model", model, *given, "--formats", *FORMATS, "--output", output
    )
    assert status == 0
    return output, model


def test_formats_under_a_budget(lsq, measured, tmp_path):
    costs, model = measured
    output = tmp_path / "mix"
    given = ["--costs", costs, "--bits", "4.5", "--at-least", "*down_proj*=8", "--output", output]
    status, said, _ = lsq("allocate", *given)
    assert status == 0 and "int4/row for all weights has" in said
    assert "not rounded by lsq.convert, stay as they are: model.embed_tokens.weight" in said
    assert {path.name for path in output.iterdir()} >= set(allocate.OUTPUTS)
    text = (output / allocate.TEXTS[0]).read_text().strip()
    written = json.loads((output / allocate.JSON).read_text())
    assert written["weight_format"] == text and 4 < written["bits"] <= 4.5
    assert written["weights"] == read_costs(costs / "sensitivity.json").weights
    joined = next(one for one in written["chosen"] if len(one["names"]) == 3)
    assert [name.split(".")[-2] for name in joined["names"]] == ["q_proj", "k_proj", "v_proj"]
    found = transformers.AutoModelForCausalLM.from_pretrained(model)
    package.convert(found, QuantConfig(weight_format=f"@{output / allocate.TEXTS[0]}"))
    quants = [module.quant for module in found.modules() if hasattr(module, "quant")]
    assert all(quant.coded for quant in quants) and len({one.weight_format for one in quants}) > 1
    down = next(one for one in written["chosen"] if "down_proj" in one["names"][0])
    assert down["format"] == "int8/row"

    status, _, error = lsq("allocate", *given)
    assert status != 0 and "is there already; choose another, or replace it" in error
    assert lsq("allocate", *given, "--overwrite", "--method", "greedy", "--rule", "second")[0] == 0


def test_bytes(lsq, measured, tmp_path):
    costs, _ = measured
    output = tmp_path / "mix"
    status, *_ = lsq("allocate", "--costs", costs, "--bytes", "20kB", "--output", output)
    written = json.loads((output / allocate.JSON).read_text())
    assert status == 0 and 15_000 < written["bytes"] <= 20_000


@pytest.mark.parametrize(
    "given, message",
    [
        ([], "there is no budget; give bits or bytes or operations or milliseconds or joules"),
        (["--bits", "1"], "the budget is 1.000 bits of a value or"),
        (["--bits", "-2"], "'-2' is not a number above 0"),
        (["--bits", "nan"], "'nan' is not a number above 0"),
        (["--bytes", "7XB"], "'7XB' is no number of bytes above 0, such as 300000"),
        (["--bits", "4", "--at-least", "*head*"], "is no pattern and bits"),
        (["--bits", "4", "--at-least", "nothing=4"], "no tensor is called 'nothing'"),
        (["--bits", "8", "--at-least", "*down*=12"], "must have at least 12 bits"),
        (["--bits", "4", "--model", "nowhere"], "nowhere"),
        (["--bits", "4", "--method", "refine"], "has no data in it; give --text FILE"),
        (["--bits", "4", "--formats", "nvfp4"], "formats are nvfp4; measured were int8/row"),
        (["--bits", "4", "--activations"], "no activations were measured"),
        (["--bits", "4", "--method", "exact", "--mixes", "9"], "measures nothing: leave --mixes"),
    ],
)
def test_what_is_refused(lsq, measured, tmp_path, given, message):
    costs, _ = measured
    status, _, error = lsq("allocate", "--costs", costs, *given, "--output", tmp_path / "mix")
    assert status != 0 and message in error
    assert not list((tmp_path / "mix").glob("*.json"))


def test_other_models_and_files_as_folders_are_refused(lsq, measured, tmp_path):
    costs, model = measured
    other, output = tmp_path / "other", tmp_path / "mix"
    other.mkdir()
    config = json.loads((model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    given = ["allocate", "--costs", costs, "--bits", "4.5", "--output", output]
    status, _, error = lsq(*given, "--model", other)
    assert status != 0 and "the costs are of another model: " in error and "[96, 64]" in error
    assert not output.exists()
    output.write_text("")
    status, _, error = lsq(*given)
    assert status != 0 and f"--output {output} is a file; give a folder" in error


def test_costs_of_a_stopped_measurement_are_refused(lsq, measured, tmp_path):
    costs, _ = measured
    path = costs / "sensitivity.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "finished": False}))
    given = ["--bits", "4", "--output", tmp_path / "mix"]
    status, _, error = lsq("allocate", "--costs", path, *given)
    assert status != 0 and "let the same `lsq sensitivity` go on" in error
    path.write_text("{}")
    status, _, error = lsq("allocate", "--costs", path, *given)
    assert status != 0 and "give a file of `lsq sensitivity`" in error


@pytest.mark.thorough
def test_mixes_are_measured(lsq, measured, texts, tmp_path):  # noqa: F811
    costs, _ = measured
    output = tmp_path / "mix"
    given = ["--costs", costs, "--bits", "4.5", "--output", output, "--quiet", "--words", "40"]
    status, said, _ = lsq("allocate", *given, "--text", texts[0], "--mixes", "6")
    assert status == 0 and "measured together: " in said and "of 6 mixes" in said
    assert "on sentences held out: " in said and "int4/row" in said.split("held out")[1]
    written = json.loads((output / allocate.JSON).read_text())
    assert written["bits"] <= 4.5
    mixes = json.loads((output / allocate.MIXES).read_text())["mixes"]
    assert len(mixes) == 6
    chosen = ",".join(one["format"] for one in written["chosen"])
    assert chosen in [one["formats"] for one in mixes] or chosen == ",".join(["int4/row"] * 5)
    again = lsq("allocate", *given, "--overwrite", "--text", texts[0], "--mixes", "6")
    assert again[0] == 0 and again[1] == said
    given = [*given, "--overwrite", "--method", "greedy", "--text", texts[0]]
    status, _, error = lsq("allocate", *given)
    assert status != 0 and "--method greedy measures nothing: leave --text out" in error


@pytest.mark.thorough
def test_a_translator(lsq, output, tmp_path, monkeypatch):
    """Its joined projections are one weight, and its checkpoint is converted by the file."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
    costs, mix = tmp_path / "costs", tmp_path / "mix"
    given = ["--formats", *FORMATS, "--weights-only", "--words", "60", "--quiet"]
    assert lsq("sensitivity", "--model", output, *given, "--output", costs)[0] == 0
    given = ["--bits", "4.6", "--mixes", "4", "--words", "60", "--quiet"]
    status, said, error = lsq("allocate", "--costs", costs, *given, "--output", mix)
    assert status == 0, error
    assert "encoder.layers.0.self_attn.qkv_weight" in said and "of 4 mixes" in said
    assert "not measured, get int8: decoder.output_projection.weight" in said
    text = (mix / allocate.TEXTS[0]).read_text().strip()
    assert "decoder.output_projection.weight=int8" in text or text.startswith("int8,")
    checkpoint, other = output / "int8" / "model" / "checkpoint_best.pt", tmp_path / "other.pt"
    given = ["--weight-format", f"@{mix / allocate.TEXTS[0]}", "--output", other]
    assert lsq("convert-checkpoint", checkpoint, *given)[0] == 0
    stored = torch.load(other, weights_only=False)["cfg"]["model"]
    assert stored.lsq_weight_format == text
    given = ["--bits", "4.6", "--operations", "1e9", "--output", tmp_path / "none"]
    status, _, error = lsq("allocate", "--costs", costs, *given)
    assert status != 0 and "no product with" in error and "leave operations out" in error


@pytest.mark.thorough
@pytest.mark.parametrize("stop", ["progress", "draw_front"])
def test_a_stopped_command_goes_on(lsq, measured, texts, tmp_path, monkeypatch, stop):  # noqa: F811
    """Also one that replaces an allocation, and one that is stopped while it writes."""
    costs, _ = measured
    given = ["--costs", costs, "--bits", "4.5", "--quiet", "--words", "40", "--text", texts[0]]
    given += ["--mixes", "4"]
    whole, output = tmp_path / "whole", tmp_path / "mix"
    assert lsq("allocate", *given, "--output", whole)[0] == 0
    assert lsq("allocate", *given, "--output", output, "--mixes", "2")[0] == 0

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    def stopped(**options):
        return KeptMixes(**{**options, "progress": interrupt})

    with monkeypatch.context() as patch:
        name = {"progress": "KeptMixes"}.get(stop, stop)
        patch.setattr(allocate, name, {"progress": stopped}.get(stop, interrupt))
        status, _, error = lsq("allocate", *given, "--output", output, "--overwrite")
    assert status == 130 and "the same command without --overwrite goes on from there" in error
    status, _, error = lsq("allocate", *given, "--output", output)
    assert status == 0, error
    for name in (*allocate.OUTPUTS, allocate.MIXES):
        assert (whole / name).read_bytes() == (output / name).read_bytes(), name
