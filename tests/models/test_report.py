"""The report of a conversion as text."""

from lsq.models import Layer, Report
from lsq.models.report import Stack


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
    assert (
        str(report)
        == repr(report)
        == "\n".join(
            [
                "13 of 14 linear layers run in int8, 200,704 of their 264,704 weights (75.8%):",
                "    12 × h.*.up  64 → 256",
                "     1 × h2.up   64 → 64",
                "left as they are:",
                "     1 × head  64 → 1000  skip names it",
            ]
        )
    )
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


def test_of_a_model_without_layers():
    assert str(Report(layers=())) == "0 of 0 linear layers run in int8:"


def test_of_a_layer_by_itself():
    assert "the model itself  64 → 64" in str(
        Report(layers=(Layer(name="", inputs=64, outputs=64, reason=None),))
    )
