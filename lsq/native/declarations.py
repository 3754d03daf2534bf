"""Reads the structs that Python declares, and writes them as one C++ header for the CPU library and
the kernels.

A class that inherits from Value or Operation declares a struct: first its annotated fields, then
its properties marked @size (int64_t) or @factor (float), and sizes read off a tensor by
extent(...). Annotations:

    In[T]      read by the operation          T | None   may be missing: a null pointer
    Out[T]     written by it                  Host[...]  known to Python alone: not in the struct
    Array[T, 9]  up to 9 values

T is a kind of tensor (TENSORS), a number (NUMBERS), an enumeration or a value. An operation says
In or Out of every tensor and value. A field of a value has the direction of the field that holds
the value, unless it says In[...] itself. A shape such as `[M, N]` or `[N] or [1]` may begin the
comment behind a field or the docstring below it: program/declare.py checks tensors by it before
C++ reads them.
The header asserts every size and offset that Python assumes. The library's checksum covers it, so
a library with other declarations is refused when it is loaded.

Imports nothing of lsq: setup.py runs this file as well.
"""

import ast
import re
import runpy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]

TENSORS = {
    "Activations": "Float",
    "Floats": "float",
    "Codes": "int8_t",
    "Bits": "uint8_t",
    "Offsets": "int32_t",
    "Integers": "int32_t",
    "Indices": "int64_t",
    "Key": "int64_t",
    "Bytes": "uint8_t",
    "AnyFloats": "void",
    "Parameters": "float",
}
"""Kinds of tensors -> their elements in C++. Float is float32, or on a GPU perhaps a 16-bit float.
For AnyFloats another field tells C++ the dtype."""
NUMBERS = {"int": "int64_t", "bool": "int64_t", "float": "float"}
MARKS = {"size": "int", "factor": "float"}
OFFSET = (
    "#ifdef __CUDACC_RTC__  // NVRTC 13.0 lacks __builtin_offsetof",
    "#define LSQ_OFFSET(type, field) __INTADDR__(&static_cast<type*>(nullptr)->field)",
    "#else",
    "#define LSQ_OFFSET(type, field) __builtin_offsetof(type, field)",
    "#endif",
)
"""A macro for every compiler of the header: the constant offset of a field in its struct."""
_SHAPE = re.compile(r"\[([^\]]+)\]")
_FORM = re.compile(
    r"(?:(?P<direction>In|Out)\[)?(?:(?P<kind>\w+)|Array\[(?P<element>\w+), (?P<count>\d+)\])"
    r"(?(direction)\])(?P<optional> \| None)?"
)


@dataclass(frozen=True)
class Field:
    """One declared field."""

    name: str
    kind: str
    """A key of TENSORS or NUMBERS, or the name of a value or an enumeration."""
    direction: str = ""
    """"In", "Out", or "": the direction of the field that holds this value."""
    optional: bool = False
    count: int = 0
    """Number of values of an array; 0: no array."""
    derived: bool = False
    """Whether it is a property, computed from the other fields."""
    shapes: tuple[tuple[str, ...], ...] = ()
    """Shapes that its comment or docstring allows, each of names of sizes, numbers, and their sums
    and products; (): it names none."""


@dataclass(frozen=True)
class Declaration:
    """A declared struct or enumeration."""

    name: str
    base: str
    fields: tuple[Field, ...] = ()
    members: tuple[tuple[str, int], ...] = ()
    """(name, value) of each member of an enumeration."""


def parse(owner: str, name: str, annotation: str) -> Field | None:
    """Return the field that an annotation declares; None for Host. Raises ValueError: the
    annotation has none of the forms above."""
    if annotation.startswith("Host["):
        return None
    form = _FORM.fullmatch(annotation)
    if form is None:
        raise ValueError(
            f"{owner}.{name} is {annotation}; write T, In[T], Out[T] or Host[...], and | None"
            " behind it"
        )
    kind, optional, count = form["kind"] or form["element"], form["optional"], form["count"]
    return Field(name, kind, form["direction"] or "", optional is not None, int(count or 0))


def check(one: Declaration, known: Mapping[str, str]) -> None:
    """Raise ValueError for fields that no struct can have: a kind is unknown, a number is optional,
    or an operation says neither In nor Out. `known`: class -> its base."""
    for field in one.fields:
        where, base = f"{one.name}.{field.name}", known.get(field.kind)
        number, holds = (
            field.kind in NUMBERS or base == "IntEnum",
            field.kind in TENSORS or base == "Value",
        )
        if not (number or holds):
            allowed = ", ".join([*TENSORS, *NUMBERS])
            raise ValueError(
                f"{where} is of kind {field.kind}; allowed: {allowed}, enumerations and values"
            )
        if field.count and (base != "Value" or field.optional):
            raise ValueError(f"{where} is an array: of values alone, and always there")
        if number and (field.optional or field.direction):
            raise ValueError(f"{where} is a number: it is always there, and neither In nor Out")
        if holds and one.base == "Operation" and not field.direction:
            raise ValueError(
                f"{where} belongs to an operation: write In[{field.kind}] or Out[{field.kind}]"
            )


@cache
def declarations() -> dict[str, Declaration]:
    """Return every declared struct and enumeration by name, each after those that it contains."""
    sources = [PACKAGE / "program" / "values.py", *sorted((PACKAGE / "ops").glob("*.py"))]
    found = [one for path in sources for one in _declared(path.read_text(encoding="utf-8"))]
    order = {"IntEnum": 0, "Value": 1, "Operation": 2}
    bases = {one.name: one.base for one in found}
    for one in found:
        check(one, bases)
    return {one.name: one for one in sorted(found, key=lambda one: order[one.base])}


def _declared(source: str) -> Iterator[Declaration]:
    lines = source.splitlines()
    for node in ast.parse(source).body:
        base = ast.unparse(node.bases[0]) if isinstance(node, ast.ClassDef) and node.bases else ""
        if base in ("Value", "Operation"):
            yield Declaration(node.name, base, tuple(_fields(node, lines)))
        elif base == "IntEnum":
            members = [
                (one.targets[0].id, one.value.value)
                for one in node.body
                if isinstance(one, ast.Assign)
            ]
            yield Declaration(node.name, base, members=tuple(members))


def _fields(node: ast.ClassDef, lines: list[str]) -> Iterator[Field]:
    for one, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(one, ast.AnnAssign) and (
            field := parse(node.name, one.target.id, ast.unparse(one.annotation))
        ):
            text = lines[one.end_lineno - 1].partition("  # ")[2]
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = following.value.value
            yield replace(field, shapes=_shapes(text))
    for one in node.body:
        if isinstance(one, ast.FunctionDef):
            marks = [MARKS.get(ast.unparse(mark)) for mark in one.decorator_list]
            if any(marks):
                yield Field(one.name, marks[0], derived=True)
        elif isinstance(one, ast.Assign) and ast.unparse(one.value).startswith("extent("):
            yield Field(one.targets[0].id, MARKS["size"], derived=True)


def _shapes(text: str) -> tuple[tuple[str, ...], ...]:
    """Return the shapes in the first sentence of a text that begins with a shape."""
    found = _SHAPE.findall(text.split(". ")[0]) if text.startswith("[") else ()
    return tuple(tuple(size.strip() for size in one.split(",")) for one in found)


def layout(name: str) -> tuple[int, list[tuple[str, int]]]:
    """Return (bytes, offset of each field) of a struct, by the layout rules of 64-bit C++."""
    offset, widest, offsets = 0, 1, []
    for field in declarations()[name].fields:
        size, alignment = _size(field)
        offset += -offset % alignment
        offsets.append((field.name, offset))
        offset += size
        widest = max(widest, alignment)
    return offset + -offset % widest, offsets


def _size(field: Field) -> tuple[int, int]:
    declared = declarations().get(field.kind)
    if declared is not None and declared.base == "Value":
        return layout(field.kind)[0] * (field.count or 1), 8
    size = 4 if field.kind == "float" else 8
    return size, size


def header() -> str:
    lines = [
        "// Written by lsq/native/declarations.py from the classes of the same names in lsq/program"
        " and lsq/ops."
    ]
    lines += ["#pragma once", "", *OFFSET, "", "namespace lsq {", "", *_layouts(), ""]
    for one in declarations().values():
        lines += _enumeration(one) if one.base == "IntEnum" else _struct(one)
    return "\n".join([*lines, "}  // namespace lsq", "", "#undef LSQ_OFFSET", ""])


def _layouts() -> list[str]:
    """Return the constants of lsq/quant/layouts.py."""
    return runpy.run_path(str(PACKAGE / "quant" / "layouts.py"))["constants"]()


def _enumeration(one: Declaration) -> list[str]:
    members = ", ".join(f"{name} = {value}" for name, value in one.members)
    return [f"enum class {one.name} : int64_t {{ {members} }};", ""]


def _struct(one: Declaration) -> list[str]:
    size, offsets = layout(one.name)
    checks = [f"sizeof({one.name}) == {size}"]
    checks += [f"LSQ_OFFSET({one.name}, {name}) == {offset}" for name, offset in offsets]
    return [
        f"struct {one.name} {{",
        *(f"    {_member(field)};" for field in one.fields),
        "};",
        "static_assert(",
        "    " + " &&\n    ".join(checks) + ",",
        '    "laid out as in Python");',
        "",
    ]


def _member(field: Field) -> str:
    if field.kind in TENSORS:
        constant = "const " if field.direction == "In" else ""
        return f"Pointer<{constant}{TENSORS[field.kind]}> {field.name}"
    array = f"[{field.count}]" if field.count else ""
    return NUMBERS.get(field.kind, field.kind) + f" {field.name}{array}"
