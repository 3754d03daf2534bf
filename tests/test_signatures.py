"""No function of the package takes more than nine parameters, self counted."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lsq"
MOST = 9


def wide(source: str) -> list[tuple[str, int]]:
    """(name, parameters) of the functions in a source that take more than MOST; *args and **options
    are no names."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
            if count > MOST:
                found.append((node.name, count))
    return found


def test_all_functions_are_narrow():
    found = {
        str(path): wide(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))
    }
    assert not {path: functions for path, functions in found.items() if functions}


def test_wide_functions_are_seen():
    names = ", ".join(f"a{number}" for number in range(MOST))
    assert not wide(f"def f({names}, *rest, **options): pass")
    assert wide(f"class A:\n  def g(self, {names}): pass\nasync def h({names}, *, b): pass") == [
        ("h", 10),
        ("g", 10),
    ]
