"""State that belongs to the whole process, not to a model: at most six objects in lsq/."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lsq"
REGISTRIES = {
    "quant/numbers.py: NUMBER_FORMATS": (
        "options and checkpoints name number formats, and have no object that declared them"
    ),
    "run/parameter_state.py: steps": "optimizers are given parameters, and know no modules",
    "memory/kept.py: _process": "memory belongs to a process, whichever layer asks for it",
    "gemm/cuda.py: files": "tuned files decide for all layers and threads",
    "dist/roll_call.py: _current": "whoever sees an exchange fail has no roll call at hand",
    "fairseq/compatibility/checkpoints.py: _held": (
        "fairseq claims a folder by a function of a module, and never releases it"
    ),
}
"""file: name -> why nothing else can hold it."""
CONTAINERS = set("dict list set bytearray defaultdict OrderedDict Counter deque".split())
STATEFUL = set(
    "WeakKeyDictionary WeakValueDictionary WeakSet local ExitStack count Queue SimpleQueue".split()
)
CHANGES = set(
    """
    add append appendleft clear discard extend insert pop popitem popleft remove setdefault update
    """.split()
)


def last_name(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def fixed_classes(tree: ast.Module) -> dict[str, bool]:
    """Classes of a file -> whether their objects never change: frozen, tuples and enumerations."""
    return {
        node.name: any("frozen=True" in ast.unparse(one) for one in node.decorator_list)
        or any(last_name(base) in ("NamedTuple", "Enum", "IntEnum") for base in node.bases)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def changed_names(tree: ast.Module) -> set[str]:
    """Names whose objects a file changes in place inside of functions."""
    changed = set()
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.Lambda)]
    for node in (node for function in functions for node in ast.walk(function)):
        if isinstance(node, ast.Call) and last_name(node.func) in CHANGES:
            changed.add(last_name(getattr(node.func, "value", node)))
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed.add(last_name(node.value))
        if isinstance(node, ast.AugAssign):
            changed.add(last_name(node.target))
    return changed


def registries(path: str, source: str, changed: set[str] = frozenset()) -> set[str]:
    """Names at the top of a file that change at run time: rebound by `global`, containers that
    functions of this file or others (`changed`) change, and objects of classes that do."""
    tree = ast.parse(source)
    classes, changed = fixed_classes(tree), changed | changed_names(tree)
    found = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        kind = last_name(getattr(node.value, "func", node.value))
        displayed = isinstance(
            node.value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
        )
        called = isinstance(node.value, ast.Call)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = last_name(target)
            container = displayed or (called and kind in CONTAINERS)
            stateful = called and (kind in STATEFUL or not classes.get(kind, True))
            if isinstance(target, ast.Name) and (stateful or (container and name in changed)):
                found.add(name)
    return {f"{path}: {name}" for name in found}


@pytest.mark.thorough
def test_state_of_the_process_is_listed_with_its_reason():
    files = {
        str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))
    }
    elsewhere = {
        name
        for source in files.values()
        for name in changed_names(ast.parse(source))
        if name.strip("_").isupper()
    }
    found = set().union(*(registries(path, source, elsewhere) for path, source in files.items()))
    assert found == set(REGISTRIES)
    assert len(found) <= 6


@pytest.mark.parametrize(
    "source",
    [
        "seen = {}\ndef f(x):\n    seen[x] = 1",
        "seen = []\ndef f(x):\n    seen.append(x)",
        "seen: dict[str, int] = defaultdict(int)\ndef f(x):\n    seen[x] += 1",
        "seen = {x: 0 for x in y}\ndef f(x):\n    del seen[x]",
        "seen = None\ndef f(x):\n    global seen\n    seen = x",
        "import weakref\nseen = weakref.WeakSet()",
        "seen = threading.local()",
        "seen = itertools.count()",
        "class State:\n    pass\nseen = State()",
        "@dataclass\nclass State:\n    x: int\nseen = State(x=0)",
        "seen = dict()\nlambda x: seen.update(x)",
    ],
)
def test_planted_registry_is_found(source):
    assert registries("run/new.py", source) == {"run/new.py: seen"}


@pytest.mark.parametrize(
    "source",
    [
        "TABLE = {'a': 1}\ndef f(x):\n    return TABLE[x]",
        "@dataclass(frozen=True)\nclass State:\n    x: int\nseen = State(x=0)",
        "class Pair(NamedTuple):\n    x: int\nPAIR = Pair(1)",
        "def f():\n    seen = []\n    seen.append(1)",
        "logger = logging.getLogger(__name__)",
        "lock = threading.Lock()",
        "current = ContextVar('current', default=None)",
    ],
)
def test_what_does_not_change_is_no_registry(source):
    assert registries("run/new.py", source) == set()
