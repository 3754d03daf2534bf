"""Which layers are chosen, the reasons why the others are not, and the report of both."""

import pytest
import torch
from torch import nn

from lsq.config import QuantConfig
from lsq.models.selection import Layer, Report, Stack, conversions
from tests.models.models import Model, model


def reasons(
    model: nn.Module, quant: QuantConfig | None = None, *, skip=(), minimum_width=64, tied=False
):
    options = {"minimum_width": minimum_width, "tied": tied, "fused": False}
    found = conversions(model, quant or QuantConfig(), skip, **options)
    return {one.entry.name: one.entry.reason for one in found}


def chosen(*arguments, **options) -> set[str]:
    return {name for name, reason in reasons(*arguments, **options).items() if reason is None}


BLOCKS = {f"blocks.{number}.{layer}" for number in range(2) for layer in ("up", "mix", "down")}


def test_every_linear_layer_is_named_and_the_usual_ones_are_chosen():
    found = reasons(model())
    assert found.keys() == {*BLOCKS, "head", "score"}
    assert chosen(model()) == BLOCKS
    assert found["head"] == "shares its weight with the embedding words (tied=True converts it)"
    assert found["score"].startswith("3 outputs: narrower than 64")
    assert chosen(model(), tied=True) == {*BLOCKS, "head"}


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ("blocks.0.up", {"blocks.0.up"}),
        ("up", {"blocks.0.up", "blocks.1.up"}),
        ("blocks.1", {name for name in BLOCKS if "1" in name}),
        (["*.mix", "0.down"], {"blocks.0.mix", "blocks.1.mix", "blocks.0.down"}),
        ("blocks.?.d*", {"blocks.0.down", "blocks.1.down"}),
        (
            lambda layer, name: isinstance(layer, nn.Linear) and layer.bias is None,
            {"blocks.0.down", "blocks.1.down"},
        ),
    ],
)
def test_what_is_skipped(skip, left):
    found = reasons(model(), skip=skip)
    assert {name for name in BLOCKS if found[name] is not None} == left
    assert all(found[name] == "skip names it" for name in left)


def test_what_peft_puts_beside_a_layer_is_an_adapter():
    class Wrapped(nn.Module):
        __module__ = "peft.tuners.lora.layer"

        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(64, 64)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(64, 8)})

    found = conversions(nn.Sequential(Wrapped()), QuantConfig(), minimum_width=64)
    assert {one.entry.name: one.entry.adapter for one in found} == {
        "0.base_layer": False,
        "0.lora_A.default": True,
    }


def test_a_pattern_that_fits_nothing_is_refused_with_what_is_near():
    with pytest.raises(
        ValueError,
        match="skip names 'blocks.0.upp', but no module of this model is called so; near",
    ):
        reasons(model(), skip=["head", "blocks.0.upp"])


@pytest.mark.parametrize("skip", [None, 5, [None], ["head", 5]])
def test_names_to_skip_are_texts(skip):
    with pytest.raises(TypeError, match="skip is .*; it must be a name or a list of names"):
        reasons(model(), skip=skip)


def test_names_to_skip_may_come_from_a_generator():
    assert reasons(model(), skip=(name for name in ["head"]))["head"] == "skip names it"


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Linear(72, 64), "72 inputs: int8 products need a multiple of 16"),
        (nn.Linear(64, 100), "100 outputs: int8 products need a multiple of 16"),
        (nn.Linear(48, 64), "48 inputs: narrower than 64 gains nothing (minimum_width)"),
        (nn.Linear(64, 64, dtype=torch.float64), "has a weight of torch.float64"),
        (
            nn.MultiheadAttention(64, 2).out_proj,
            "is of a torch.nn.MultiheadAttention, which multiplies by itself",
        ),
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
            "is a ParametrizedLinear, which may compute something else",
        ),
        (nn.Linear(64, 64, device="meta"), None),
        (nn.Linear(64, 64, dtype=torch.bfloat16), None),
    ],
)
def test_layers_that_are_special(layer, reason):
    assert reasons(nn.Sequential(layer))["0"] == reason


def test_a_forward_of_its_own_is_told():
    layer = nn.Linear(64, 64)
    layer.forward = lambda x: x
    assert "forward of its own" in reasons(layer)[""]


def test_shapes_and_dtypes_that_no_program_has():
    wide, high, precise = (nn.Linear(64, 64) for _ in range(3))
    wide.in_features = 80
    high.bias = nn.Parameter(torch.zeros(1))
    precise.bias.data = precise.bias.data.double()
    found = reasons(nn.Sequential(wide, high, precise))
    assert found["0"] == "has a weight [64, 64] in the place of [64, 80]"
    assert (found["1"], found["2"]) == (
        "has a bias of torch.float32 [1]",
        "has a bias of torch.float64 [64]",
    )


def test_a_class_that_was_patched(monkeypatch):
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert reasons(nn.Linear(64, 64))[""] == f"has a Linear.forward that {__name__} defines"


def test_formats_that_do_not_take_a_weight_in_out():
    found = reasons(model(), QuantConfig(weight_format="int4"))
    assert found["blocks.0.mix"] == "has a weight [inputs, outputs], which int4 does not store"
    assert found["blocks.0.up"] is None


def test_narrow_layers_on_demand():
    layer = nn.Linear(16, 32)
    assert chosen(layer) == set() and chosen(layer, minimum_width=16) == {""}


def test_a_module_that_is_there_twice_is_one_layer():
    block = Model().blocks[0]
    assert chosen(nn.ModuleList([block, block])) == {"0.up", "0.mix", "0.down"}


# The report


def test_layers_of_one_kind_share_a_line():
    layers = [
        *(
            Layer(name=f"h.{number}.up", inputs=64, outputs=256, reason=None)
            for number in range(12)
        ),
        Layer(name="h2.up", inputs=64, outputs=64, reason=None),
        Layer(name="head", inputs=64, outputs=1000, reason="skip names it"),
    ]
    report = Report(layers=tuple(layers))
    assert str(report) == repr(report)
    assert str(report).splitlines() == [
        "13 of 14 linear layers run in int8, 200,704 of their 264,704 weights (75.8%):",
        "    12 × h.*.up  64 → 256",
        "     1 × h2.up   64 → 64",
        "left as they are:",
        "     1 × head  64 → 1000  skip names it",
    ]
    assert report.converted == (*(f"h.{number}.up" for number in range(12)), "h2.up")
    assert report.left == {"head": "skip names it"}


def test_adapters_share_a_line():
    sizes, reason = ((64, 8), (8, 64)), "8 {}: narrower than 64 gains nothing (minimum_width)"
    adapters = [
        Layer(
            name=f"h.{number}.q.lora_{letter}.default",
            inputs=inputs,
            outputs=outputs,
            adapter=True,
            reason=reason.format("outputs" if letter == "A" else "inputs"),
        )
        for number in range(3)
        for letter, (inputs, outputs) in zip("AB", sizes, strict=True)
    ]
    assert str(Report(layers=tuple(adapters))).splitlines()[1:] == [
        "left as they are:",
        "     6 × PEFT's adapters    narrower than 64 gains nothing (minimum_width)",
    ]


def test_stacks_and_unknown_layers():
    layer = Layer(name="up", inputs=64, outputs=64, reason=None)
    stacks = tuple(Stack(name=f"h.{number}.experts.up", shape=(4, 256, 64)) for number in range(2))
    assert str(Report(layers=(layer,), stacks=stacks, unknown="SomeModel")).splitlines()[2:] == [
        "stacks of weights, which stay floats:",
        "     2 × h.*.experts.up  4 × 256 × 64  65,536 weights",
        "whole layers: none of SomeModel is one that lsq knows; linear layers run one by one",
    ]


def test_small_reports():
    assert str(Report(layers=())) == "0 of 0 linear layers run in int8:"
    layer = Layer(name="", inputs=64, outputs=64, reason=None)
    assert "the model itself  64 → 64" in str(Report(layers=(layer,)))
