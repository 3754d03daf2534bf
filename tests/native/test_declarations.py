"""What annotations become which struct, and that C++ compilers lay structs out as Python does."""

import pytest

from lsq.native import compiler, declarations
from lsq.native.declarations import Declaration, Field, parse


@pytest.mark.parametrize(
    "annotation, field",
    [
        ("In[Activations]", Field("x", "Activations", "In")),
        ("Out[Floats] | None", Field("x", "Floats", "Out", optional=True)),
        ("Codes | None", Field("x", "Codes", "", optional=True)),
        ("In[Dropout] | None", Field("x", "Dropout", "In", optional=True)),
        ("int", Field("x", "int")),
        ("float", Field("x", "float")),
        ("Out[Array[Pair, 12]]", Field("x", "Pair", "Out", count=12)),
        ("Activation", Field("x", "Activation")),
        ("Host[str]", None),
        ("Host[dict[str, int] | None]", None),
    ],
)
def test_annotations(annotation, field):
    assert parse("Example", "x", annotation) == field


@pytest.mark.parametrize(
    "annotation",
    [
        "Maybe[Floats]",
        "In[Floats | None]",
        "None | In[Floats]",
        "In[Floats] | Out[Floats]",
        "In",
        "int | 3",
    ],
)
def test_another_form_is_refused_by_name(annotation):
    with pytest.raises(
        ValueError, match=r"Example.x is .*(write T, In\[T\], Out\[T\] or Host)|kind In"
    ):
        field = parse("Example", "x", annotation)
        declarations.check(Declaration("Example", "Operation", (field,)), {})


@pytest.mark.parametrize(
    "base, field, message",
    [
        (
            "Operation",
            Field("x", "Tensor", "In"),
            "Example.x is of kind Tensor; allowed: Activations, .*, int, .*values",
        ),
        ("Operation", Field("x", "Helper", "In"), "Example.x is of kind Helper"),
        (
            "Operation",
            Field("x", "int", optional=True),
            "Example.x is a number: it is always there",
        ),
        ("Value", Field("x", "Mode", "Out"), "Example.x is a number: .* neither In nor Out"),
        (
            "Operation",
            Field("x", "Floats"),
            r"Example.x belongs to an operation: write In\[Floats\] or Out\[Floats\]",
        ),
        (
            "Operation",
            Field("x", "Floats", "In", count=2),
            "Example.x is an array: of values alone",
        ),
        (
            "Operation",
            Field("x", "Pair", "In", optional=True, count=2),
            "Example.x is an array: .* always there",
        ),
        ("Operation", Field("x", "Pair"), r"Example.x belongs to an operation: write In\[Pair\]"),
    ],
)
def test_a_field_that_no_struct_can_have_is_refused_by_name(base, field, message):
    known = {"Pair": "Value", "Mode": "IntEnum", "Helper": "object"}
    with pytest.raises(ValueError, match=message):
        declarations.check(Declaration("Example", base, (field,)), known)


def test_fields_come_first_and_marked_properties_after_them():
    source = (
        "class Scale(Operation):\n"
        "    x: In[Activations]\n    how: Host[str]\n    times: float = 2.0\n    out: Out[Floats] |"
        " None\n"
        "    @property\n    def unseen(self): ...\n"
        "    @size\n    def rows(self): ...\n    columns = extent(1, 'x')\n    unit = 3\n"
        "    @factor\n    def keep(self): ...\n"
        "class Mode(IntEnum):\n    slow = 0\n    fast = 1\n"
        "class Other(object):\n    x: int\n"
    )
    scale, mode = declarations._declared(source)
    assert [(field.name, field.kind, field.derived) for field in scale.fields] == [
        ("x", "Activations", False),
        ("times", "float", False),
        ("out", "Floats", False),
        ("rows", "int", True),
        ("columns", "int", True),
        ("keep", "float", True),
    ]
    assert (mode.name, mode.members) == ("Mode", (("slow", 0), ("fast", 1)))


def structs() -> list[str]:
    return [one.name for one in declarations.declarations().values() if one.base != "IntEnum"]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
def test_a_kernel_takes_every_struct(tmp_path, target):
    """NVRTC checks what the header asserts, on its own machine."""
    kernels = "".join(f"LSQ_KERNEL take_{name}(const {name} one) {{}}\n" for name in structs())
    source = tmp_path / "structs.cu"
    source.write_text('#include "device.cuh"\n' + kernels)
    found = compiler.compile_kernels(str(source), (), target).resources
    assert found.keys() == {f"take_{name}" for name in structs()}
