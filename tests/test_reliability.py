"""docs/reliability.md: every row names a test that is there."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
ROW = re.compile(r"^\| .+ \| .+ \| `([\w/.]+)::(\w+)` \|$")


def rows() -> list[str]:
    lines = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8").splitlines()
    return [
        line
        for line in lines
        if line.startswith("| ") and not line.startswith(("| Fault |", "| --- |"))
    ]


def functions(path: Path) -> set[str]:
    """Names of the functions of a module."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


def test_every_row_names_a_test_that_exists():
    named = [ROW.fullmatch(row) for row in rows()]
    assert len(named) > 50 and all(named), [
        row for row, found in zip(rows(), named, strict=True) if not found
    ]
    missing = []
    for found in named:
        path = TESTS / found[1]
        if (
            not path.is_file()
            or not found[2].startswith("test_")
            or found[2] not in functions(path)
        ):
            missing.append(found[0])
    assert not missing


def test_no_fault_stands_twice():
    faults = [row.split(" | ")[0] for row in rows()]
    assert len(faults) == len(set(faults))
