"""Number formats that users declare: their values against plain arithmetic, and what is refused."""

import math
from fractions import Fraction

import pytest
import torch

import lsq
from lsq.quant.declared import declare, declared_tables
from lsq.quant.numbers import BUILT_IN, NUMBER_FORMATS, find_number, scaled_format

SEVEN = (-4, -2, -1, 0, 1, 2, 4)


def test_values_or_a_rule_of_codes_make_a_format():
    """Named as the function; the decorator leaves the format in its place."""

    @lsq.number_format
    def seven():
        return SEVEN

    @lsq.number_format(bits=3)
    def signed_squares(code, middle=3):
        return (code - middle) * abs(code - middle)

    @lsq.number_format()
    def from_another():
        return lsq.NumberFormat(name="other", values=(0.5, -0.5))

    @lsq.number_format
    def of_a_tensor():
        return torch.linspace(-1, 1, 5)

    assert seven == lsq.NumberFormat(name="seven", values=tuple(map(float, SEVEN)))
    assert signed_squares.values == (-9, -4, -1, 0, 1, 4, 9, 16)
    assert find_number("from_another").values == (0.5, -0.5)
    assert find_number("of_a_tensor").values == (-1, -0.5, 0, 0.5, 1)
    assert declare("halves", [Fraction(1, 2), 0]).values == (0.5, 0)


@pytest.mark.parametrize("grain", ["row", "group16", "group64"])
def test_every_code_encodes_and_decodes(grain):
    """Under scales that are powers of two, which divide exactly; the nearest value by hand."""
    number = declare("seven", SEVEN)
    codes = torch.arange(7, dtype=torch.uint8)
    assert torch.equal(number.encode(number.decode(codes)), codes)
    form = scaled_format(f"seven/{grain}/bfloat16")
    x = number.decode(torch.randint(0, 7, (6, 64)))
    x.view(-1, 16)[:, 0] = 4  # the largest of every block
    assert torch.equal(form.decode(form.encode(x / 8)), x / 8)
    x = torch.randn(6, 64)
    x.view(-1, 16)[:, 0] = 4
    found = form.decode(form.encode(x, torch.tensor(4.0)))
    for value, rounded in zip(x.flatten().tolist(), found.flatten().tolist(), strict=True):
        assert abs(value - rounded) == min(abs(value - one) for one in SEVEN)
    packed = number.pack(codes)
    assert len(packed) == 3 and torch.equal(number.unpack(packed, (7,)), codes)


def test_a_copy_of_a_format_rounds_as_that():
    for name in ("fp4-e2m1", "nf4", "lloyd3-gaussian"):
        copied = declare(f"{name}.copy", find_number(name).values)
        x = torch.randn(17, 48)
        for rest in ("row", "group32/e8m0", "group16/e4m3"):
            codes = [
                scaled_format(f"{one}/{rest}").encode(x, "mse").codes for one in (name, copied.name)
            ]
            assert torch.equal(*codes)


@pytest.mark.parametrize("bits", [0, 9, -1, 2.5, True, "3"])
def test_wrong_bits_are_refused(bits):
    with pytest.raises(ValueError, match=f"^bits is {bits!r}; it must be a whole number from 1 to"):
        lsq.number_format(bits=bits)
    with pytest.raises(ValueError, match=f"^bits is {bits!r}; "):
        lsq.number_format(lambda code: code, bits=bits)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1], "wrong has 1 codes for 1 finite values; give it 2 to 256 codes"),
        ([], "wrong has 0 codes"),
        (range(300), "wrong has 300 codes"),
        ([2, 2, 2.0], "wrong has 3 codes for 1 finite values; .* at least 2 values"),
        ([0, math.nan], "value 1 of wrong is nan; values are finite numbers"),
        ([math.inf, 0], "value 0 of wrong is inf; "),
        ([0, 10**400], "value 1 of wrong is 10+; "),
        ([0, True], "value 1 of wrong is True; "),
        ("01", "value 0 of wrong is '0'; "),
        ([0, None], "value 1 of wrong is None; "),
        (3, "wrong gives 3; it must give its values"),
        (None, "wrong gives None; "),
        ([0, 1e-30], "the largest value of wrong is 1e-30; multiply all of them"),
        ([1, 1.001, 1.002, 0], "boundaries between values of wrong lie closer than a part in 128"),
    ],
)
def test_wrong_values_are_refused(values, said):
    with pytest.raises(ValueError, match=f"^{said}"):

        @lsq.number_format
        def wrong():
            return values

    assert NUMBER_FORMATS.keys() == BUILT_IN


def test_functions_that_take_something_else_are_refused():
    with pytest.raises(
        ValueError, match="^wrong: missing .*'code'; with bits the function takes a"
    ):

        @lsq.number_format
        def wrong(code):
            return code

    with pytest.raises(ValueError, match="^wrong: too many positional arguments; with bits"):

        @lsq.number_format(bits=2)
        def wrong():
            return 0, 1

    with pytest.raises(TypeError, match="stands above a function, not 'seven'"):
        lsq.number_format("seven")


@pytest.mark.parametrize(
    ("name", "near"), [("nf4", "nf4"), ("mxfp4", "mxfp4, mxfp8-e4m3"), ("uint4", "uint4, ")]
)
def test_names_of_lsq_are_taken(name, near):
    with pytest.raises(
        ValueError, match=rf"^{name} is a name of lsq's own \(near it are {near}.*my_"
    ):
        declare(name, SEVEN)
    assert declare(f"my_{name}", SEVEN).name == f"my_{name}"


@pytest.mark.parametrize("name", ["a/b", "a,b", "a=b", "a*", "", " a", "<lambda>", "-a"])
def test_names_that_nothing_can_read_are_refused(name):
    with pytest.raises(ValueError, match="is no name of a number format; give letters, digits"):
        declare(name, SEVEN)


def test_a_name_has_one_table():
    first = declare("seven", SEVEN)
    assert declare("seven", map(float, SEVEN)) is first
    with pytest.raises(
        ValueError,
        match=r"^seven has 7 values here and 9 in a file, and value 0 is -4.0 here and 0.0 there;",
    ):
        declare("seven", range(9), "a file")
    with pytest.raises(ValueError, match="value 7 is None here and 8.0 there"):
        declare("seven", (*SEVEN, 8))
    assert find_number("seven") is first


def test_unknown_names_offer_declared_ones():
    with pytest.raises(ValueError, match="'seven'; allowed: .* that @lsq.number_format declares"):
        scaled_format("seven/row")
    declare("seven", SEVEN)
    with pytest.raises(ValueError, match=r"no number is called 'sevn' \(did you mean seven\?\)"):
        scaled_format("sevn/row")
    with pytest.raises(ValueError, match="'seven' does not say which values share a scale"):
        scaled_format("seven")


def test_tables_of_formats():
    declare("seven", SEVEN)
    declare("two", (0, 1))
    assert declared_tables(["int8,*fc2*=seven/row, *fc1* = nvfp4", "float32"]) == {
        "seven": [-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0]
    }
