"""Names of formats, right and wrong."""

import pytest

from lsq.quant.numbers import NUMBERS, PRESETS, Grain, grain, scaled_format
from lsq.quant.numbers.names import all_parts


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_what_they_stand_for(name):
    preset, written = scaled_format(name), scaled_format(PRESETS[name])
    assert (preset.name, preset.number, preset.grain, preset.scales) == (
        name,
        written.number,
        written.grain,
        written.scales,
    )


def test_names_of_one_format():
    assert {all_parts(name) for name in ("int8-row", "int8/row", "int8/row/float32")} == {
        "int8/row/float32"
    }
    assert [all_parts(name) for name in ("int8", "float32", "*fc2*")] == [
        "int8",
        "float32",
        "*fc2*",
    ]


def test_every_number_has_its_name():
    assert all(
        make().name == name for name, make in NUMBERS.items() if not name.startswith("lloyd")
    )


def test_grains():
    found = [grain(name) for name in ("tensor", "row", "channel", "group16", "block4x16")]
    assert found == [Grain(None, None), Grain(1, None), Grain(None, 1), Grain(1, 16), Grain(4, 16)]


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "mxfp5",
            r"no number format is called 'mxfp5' \(did you mean mxfp4\b.*\?\); give one of"
            r" int8-tensor, ",
        ),
        ("MXINT8", r"'MXINT8' \(did you mean mxint8\b"),
        ("int9/row", r"no number is called 'int9' \(did you mean int"),
        ("fp8-e4m4/row", r"did you mean fp8-e4m3\b"),
        ("int4/rows", "no grain is called 'rows'; allowed: tensor, row, channel"),
        ("int4/group0", "no grain is called 'group0'"),
        (
            "int4/row/uint5",
            r"no scales are called 'uint5' \(did you mean uint6 or uint4\?\); allowed: float32, ",
        ),
        ("int4/row/float32/3", "give one of"),
        (
            "nvfp4/row",
            "'nvfp4/row': nvfp4 has its own grain and scales, it is fp4-e2m1/group16/e4m3; leave"
            " /row out",
        ),
        (
            "int8-row/e8m0",
            "int8-row has its own grain .*, it is int8/row/float32; leave /e8m0 out, .*, as"
            " int8/row$",
        ),
        ("int6-row", r"no number format is called 'int6-row' \(did you mean int6/row\?\)"),
        ("fp8-e4m3-group32", r"\(did you mean fp8-e4m3/group32\?\)"),
        ("zzz", "no number format is called 'zzz'; give one of"),
        ("int4", "'int4' does not say which values share a scale; give int4/row, int4/group32"),
        (None, "a number format is called None; its name is a string"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name, message):
    with pytest.raises(ValueError, match=message):
        scaled_format(name)


def test_blocks_without_values_are_refused():
    with pytest.raises(ValueError, match="blocks of 0 rows and None columns"):
        Grain(0, None)
