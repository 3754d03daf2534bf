"""lsq.convert with formats by patterns of names, also of products of several weights."""

import pytest
import torch
from torch import nn

import lsq
from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear
from lsq.models import declare_formats, load_clips, save_clips
from lsq.optim import Adam
from lsq.quant.declared import declare
from lsq.quant.numbers import NUMBER_FORMATS, scaled_format
from tests.layers.shapes import decibels
from tests.layers.test_clip_format import forgotten
from tests.models.models import Conv1D
from tests.models.zoo import made, right_padded, trained


def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"fc1": nn.Linear(64, 128), "fc2": nn.Linear(128, 64), "out": nn.Linear(64, 64)}
    )


def test_patterns_choose_formats_of_layers():
    found = model()
    quant = QuantConfig(
        weight_format="int8,*fc2*=nvfp4,out.*=float32", activation_format="int8,out.*=float32"
    )
    report = lsq.convert(found, quant)
    assert str(report).startswith(
        "3 of 3 linear layers run with weights in int8,*fc2*=nvfp4,out.*=float32, activation"
    )
    fc1, fc2, out = found.values()
    assert fc1.quant == QuantConfig() and not fc2.quant.coded
    assert fc2.quant.weight_format == "nvfp4" and hasattr(fc2, "weight_clip")
    assert not any("clip" in name for name, _ in out.named_parameters())
    x = torch.randn(5, 64, requires_grad=True)
    out(fc2(fc1(x).relu())).square().sum().backward()
    assert all(
        parameter.grad is not None for parameter in found.parameters() if parameter.requires_grad
    )
    plain = model()["out"]
    torch.testing.assert_close(out(x), plain(x))  # nothing is rounded there


def test_what_a_layer_reads_is_called_as_its_weight_too():
    found = model()
    lsq.convert(
        found,
        QuantConfig(activation_format="int8,*.weight=float32,*fc2*=nvfp4,*out.input=log4.3/tensor"),
    )
    formats = [layer.quant.activation_form("input") for layer in found.values()]
    assert formats == [None, scaled_format("nvfp4"), scaled_format("log4.3/tensor")]


def test_a_pattern_that_fits_nothing_leaves_the_model_as_it_was():
    found = model()
    with pytest.raises(
        ValueError, match="weight_format gives nvfp4 to '\\*fc3\\*'.* nearest are fc2.weight, "
    ):
        lsq.convert(found, QuantConfig(weight_format="int8,*fc3*=nvfp4"))
    assert all(type(module) is nn.Linear for module in found.values())


@pytest.mark.parametrize("pattern, float_name", [("fc?.bias", "fc1.bias"), ("*out*", "out.weight")])
def test_what_stays_a_float_is_named(pattern, float_name):
    found = model()
    with pytest.raises(
        ValueError, match=f"gives nvfp4 to .*, but {float_name} stays a float here; nearest are fc"
    ):
        lsq.convert(found, QuantConfig(weight_format=f"int8,{pattern}=nvfp4"), skip="out")
    assert all(type(module) is nn.Linear for module in found.values())


def test_layers_that_share_a_weight_have_their_own_formats():
    found = model()
    found["twin"] = nn.Linear(64, 64)
    found["twin"].weight = found["out"].weight
    lsq.convert(found, QuantConfig(weight_format="int8,twin.weight=int4"))
    x = torch.randn(7, 64)
    expected = nn.functional.linear(x, found["out"].weight)
    for _ in range(2):
        first, second = found["out"](x) - found["out"].bias, found["twin"](x) - found["twin"].bias
        (first.sum() + second.sum()).backward()
        assert 35 < decibels(expected, first) and 15 < decibels(expected, second) < 30


def test_formats_that_begin_like_int4_take_what_int4_does_not():
    """Weights [inputs, outputs], which packed codes do not store."""
    found = nn.Sequential(Conv1D(64, 64))
    with pytest.raises(ValueError, match="which int4 does not store"):
        lsq.convert(found, QuantConfig(weight_format="int4"))
    report = lsq.convert(found, QuantConfig(weight_format="int4/row"))
    assert not any(layer.reason for layer in report.layers) and found[0].weight_clip.shape == (64,)


# Several weights of one product


def converted(name: str, *, fused: bool = True, **formats: str) -> torch.nn.Module:
    """After a pass that has measured its clips, in eval mode."""
    model = made(name)
    lsq.convert(model, QuantConfig(**formats), fused=fused, minimum_width=32)
    model(**right_padded((9, 5)))
    return model.eval()


@pytest.mark.parametrize(
    "name, kind, text, given",
    [
        ("llama", "weight", "int8,*q_proj*=int4,*k_proj*=int8", r"int4 to model.*\.0\..*q_proj\.w"),
        ("llama", "weight", "int4,*.1.*v_proj*=int8", r"int8 to model.*\.1\..*v_proj\.weight; but"),
        (
            "llama",
            "gradient",
            "int8,*k_proj*=mxint8",
            r"gradient_format gives int8 .*, mxint8 to .*k_",
        ),
        (
            "llama",
            "activation",
            "int8,*up_proj*=nvfp4",
            r"int8 to the input of .*gate_.*, nvfp4 to the",
        ),
        (
            "bert",
            "weight",
            "int8,*query*=int4",
            r"int4 to .*query.*, int8 to .*key.*, int8 to .*value",
        ),
        (
            "t5 v1.1",
            "weight",
            "int8,*EncDecAttention.k*=int4",
            r"int4 to decoder.*n.k.weight, int8 to",
        ),
    ],
)
def test_one_product_has_one_format(name, kind, text, given):
    model, formats = made(name), {f"{kind}_format": text}
    before = [(type(module), set(vars(module))) for module in model.modules()]
    with pytest.raises(
        ValueError, match=given + r".*: give all of them one format, or call lsq.convert with fused"
    ):
        lsq.convert(model, QuantConfig(**formats), minimum_width=32)
    assert before == [(type(module), set(vars(module))) for module in model.modules()]


def test_linear_layers_by_themselves_have_their_own():
    model = converted("llama", fused=False, weight_format="int8,*q_proj*=int4,*k_proj*=int8")
    found = {
        name.rpartition(".")[2]: one.quant.weight_format
        for name, one in model.named_modules()
        if isinstance(one, QuantizedLinear)
    }
    assert found.pop("q_proj") == "int4" and set(found.values()) == {"int8"}


@pytest.mark.parametrize(
    "name, text",
    [
        ("llama", "int8,*gate_proj*=int4"),
        pytest.param("t5 v1.1", "int8,*EncDecAttention.[kv]*=int4", marks=pytest.mark.thorough),
        pytest.param("llama", "int8,*[qkv]_proj*=int4", marks=pytest.mark.thorough),
        pytest.param(
            "t5 v1.1", "int8,*EncDecAttention.q*=int4,*wi_1*=int4", marks=pytest.mark.thorough
        ),
    ],
)
def test_other_mixtures_are_those_of_linear_layers(name, text):
    exact, batch = made(name).eval(), right_padded((9, 5))
    one, other, wide = (
        converted(name, fused=fused, weight_format=form)
        for fused, form in ((True, text), (False, text), (True, "int8"))
    )
    present = batch["attention_mask"].bool()
    found = [model(**batch).logits[present] for model in (exact, one, other, wide)]
    narrow, separate, eight = (decibels(found[0], logits) for logits in found[1:])
    assert abs(narrow - separate) < 3 and eight - narrow > 0.5


# Formats of users


def test_a_format_of_a_user_trains_evaluates_and_loads_where_nobody_declared_it(tmp_path):
    declare("seven_of_llama", (-4, -2, -1, 0, 1, 2, 4))
    quant = QuantConfig(weight_format="seven_of_llama/group64/bfloat16")
    model, batch = made("llama"), right_padded((9, 5))
    assert len(lsq.convert(model, quant).fused) == 2
    losses = trained(model, batch, Adam(model.parameters(), lr=1e-2), 8)
    assert losses[-1] < losses[0] - 0.5, losses
    expected = model.eval()(**batch).logits
    model.save_pretrained(tmp_path)
    save_clips(model, tmp_path)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    for source in (tmp_path, tmp_path / "lsq.safetensors", str(tmp_path / "state.pt")):
        forgotten("seven_of_llama")
        with pytest.raises(ValueError, match="no number is called 'seven_of_llama'"):
            QuantConfig(weight_format="seven_of_llama/row")
        declare_formats(source)
        assert NUMBER_FORMATS["seven_of_llama"]().values == (-4, -2, -1, 0, 1, 2, 4)
    again = type(model).from_pretrained(tmp_path)
    lsq.convert(again, quant)
    load_clips(again, tmp_path)
    assert torch.equal(again.eval()(**batch).logits, expected)


def test_a_state_with_two_tables_under_one_name_is_refused():
    states = []
    for values in ((0, 1), (0, 1, 2)):
        declare("twice", values)
        found = model()
        lsq.convert(found, QuantConfig(weight_format="twice/row"))
        states.append(found.state_dict())
        forgotten("twice")
    mixed = states[0] | {name: one for name, one in states[1].items() if name.startswith("out.")}
    with pytest.raises(
        ValueError, match=r"twice has 2 values here and 3 in the checkpoint \(out.format\), and val"
    ):
        declare_formats(mixed)


def test_files_that_declare_nothing_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        declare_formats(tmp_path)
    for name in ("a.safetensors", "a.pt"):
        (tmp_path / name).write_text("nothing")
        with pytest.raises(ValueError, match=f"{name} holds no state dict"):
            declare_formats(tmp_path / name)
