"""Who may import whom, and what of PyTorch: checked on the syntax tree of every file in lsq/."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lsq"

_ALLOWED = {
    "extras": "",
    "files": "",
    "native": "extras",
    "emulator": "native",
    "quant": "",
    "reference": "quant",
    "graphs": "extras files native quant",
    "config": "quant",
    "memory": "extras files native",
    "program": "config native quant",
    "gemm": "extras files native program",
    "ops": "config gemm native program quant",
    "run": "emulator gemm memory native program",
    "bits": "native ops quant run",
    "dist": "config extras ops quant run",
    "optim": "memory native ops program quant run",
    "layers": "config dist extras gemm memory native ops program quant run",
    "observe": "config dist extras layers ops program quant run",
    "models": (
        "config dist extras files graphs layers memory native observe optim program quant run"
    ),
    "text": "config extras files",
    "study": "config extras files layers models native ops program quant run",
    "serving": "config extras files layers models native ops program quant run text",
    "fairseq": (
        "config dist files gemm layers models native observe optim program quant run serving"
    ),
    "commands": (
        "config dist extras fairseq files gemm layers memory models native ops program quant run "
        "serving study text"
    ),
}
ALLOWED = {area: set(names.split()) for area, names in _ALLOWED.items()}
"""What each folder or module may import of lsq: some of those that are listed before it."""

FAIRSEQ_USERS = {"fairseq", "commands", "text"}
FOREIGN = {"ctypes", "cuda", "cupy"}
"""Packages that reach into other languages; native and the emulator alone may import them."""
COLLECTIVES = set(
    """
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single
    all_reduce all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv
    broadcast broadcast_object_list gather gather_object irecv isend monitored_barrier recv
    reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter
    scatter_object_list send
    """.split()
)
TORCH = set(
    """
    _C __future__ _disable_dynamo _foreach_copy_ _foreach_maximum_ _foreach_minimum_
    _foreach_mul _foreach_norm _int_mm _nested_tensor_from_mask
    """.split()
)
"""Names that PyTorch does not document and that lsq may use: the oldest version that lsq allows has
them, too."""


def imports(
    tree: ast.AST, module: str, is_package: bool
) -> Iterator[tuple[str, tuple[str, str], int]]:
    """Yield (full dotted name, (name that it gives in the file, what that name stands for),
    line)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield (
                    alias.name,
                    (alias.asname, alias.name) if alias.asname else (top, top),
                    node.lineno,
                )
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = parts[: len(parts) + is_package - node.level] if node.level else []
            origin = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                yield name, (alias.asname or alias.name, name), node.lineno


def dotted_uses(tree: ast.AST, names: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Yield (full dotted name, line) for every attribute chain that starts at an imported name."""
    for node in ast.walk(tree):
        chain, root = [], node
        while isinstance(root, ast.Attribute):
            chain.insert(0, root.attr)
            root = root.value
        if chain and isinstance(root, ast.Name) and root.id in names:
            yield ".".join([names[root.id], *chain]), node.lineno


def violations(path: str, source: str) -> list[str]:
    """The broken rules in one file of lsq/; `path` is relative to lsq/, e.g. "ops/linear.py"."""
    tree = ast.parse(source)
    parts = list(Path(path).with_suffix("").parts)
    area = parts[0]
    is_package = parts[-1] == "__init__"
    module = ".".join(["lsq", *(parts[:-1] if is_package else parts)])
    imported = list(imports(tree, module, is_package))
    found = []
    for name, _, line in imported:
        root, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if (
            root == "lsq"
            and rest
            and area in ALLOWED
            and target != area
            and target not in ALLOWED[area]
        ):
            found.append(f"{path}:{line}: {area} may not import {name}")
        if root == "fairseq" and area not in FAIRSEQ_USERS:
            found.append(
                f"{path}:{line}: only {', '.join(sorted(FAIRSEQ_USERS))} may import fairseq"
            )
        if root in FOREIGN and area not in ("native", "emulator"):
            found.append(f"{path}:{line}: only native may import {root}")
    uses = dotted_uses(tree, dict(given for _, given, _ in imported))
    for name, line in [*((name, line) for name, _, line in imported), *uses]:
        origin, _, last = name.rpartition(".")
        if origin.startswith("torch.distributed") and last in COLLECTIVES and area != "dist":
            found.append(f"{path}:{line}: only dist may call {name}")
        if (
            origin == "torch"
            and last.startswith("_")
            and last not in {*TORCH, "__config__", "__version__"}
        ):
            found.append(
                f"{path}:{line}: look whether the oldest PyTorch has {name}, and add it to TORCH"
            )
    return found


def test_every_folder_has_rules():
    names = {path.stem for path in PACKAGE.iterdir() if path.name[0] not in "_."}
    assert names == {*ALLOWED, "csrc"}


def test_rules_are_an_order():
    """Each may import those before it alone, so nothing imports itself by way of another."""
    before = set()
    for area, allowed in ALLOWED.items():
        assert allowed <= before, area
        before.add(area)


def test_rules_are_needed():
    """What nobody imports is not allowed either."""
    used = {area: set() for area in ALLOWED}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] in ALLOWED:
            module, is_package = ".".join(("lsq", *parts)), parts[-1] == "__init__"
            names = [name for name, *_ in imports(ast.parse(path.read_text()), module, is_package)]
            used[parts[0]] |= {name.split(".")[1] for name in names if name.startswith("lsq.")} - {
                parts[0]
            }
    assert {
        area: allowed - used[area] for area, allowed in ALLOWED.items() if allowed - used[area]
    } == {}


def test_rules_hold():
    files = sorted(PACKAGE.rglob("*.py"))
    assert files
    broken = [
        line
        for path in files
        for line in violations(str(path.relative_to(PACKAGE)), path.read_text())
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("config.py", "import lsq.program"),
        ("quant/rounding.py", "import lsq.config"),
        ("native/loader.py", "from lsq.config import QuantConfig"),
        ("native/loader.py", "from ..config import QuantConfig"),
        ("quant.py", "from lsq import ops"),
        ("quant.py", "from .layers import Embedding"),
        ("ops/linear.py", "from lsq.layers.linear import QuantizedLinear"),
        ("ops/__init__.py", "from ..run import backends"),
        ("program/builder.py", "from lsq.ops import rounding"),
        ("program/program.py", "from lsq.gemm import lookup"),
        ("dist/codec.py", "from lsq.native import loader"),
        ("run/cuda.py", "import lsq.ops.rounding"),
        ("memory/planner.py", "def late():\n    from lsq import quant"),
        ("memory/planner.py", "from lsq.run import step"),
        ("ops/linear.py", "from lsq.memory import planner"),
        ("layers/linear.py", "from lsq import study"),
        ("layers/linear.py", "import fairseq.modules"),
        ("text/corpus.py", "from lsq.commands import stages"),
        ("serving/translator.py", "from lsq.commands import logs"),
        ("study/errors.py", "from lsq.serving import model_file"),
        ("study/table.py", "from fairseq import utils"),
        ("ops/linear.py", "import ctypes"),
        ("gemm/cublaslt.py", "from cuda.bindings import nvrtc"),
        ("gemm/cublaslt.py", "import cupy"),
        ("layers/linear.py", "import torch\ntorch.distributed.all_reduce(x)"),
        ("fairseq/task.py", "import torch.distributed as dist\ndist.broadcast(x, 0)"),
        ("commands/train.py", "from torch import distributed\ndistributed.barrier()"),
        ("commands/cli.py", "from torch.distributed import all_gather as collect"),
        ("quant/rounding.py", "import torch\ntorch._foreach_clone(x)"),
        ("quant/rounding.py", "from torch import _foreach_clone as clone"),
    ],
)
def test_planted_violation_is_found(path, source):
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("config.py", "from lsq.quant import Format\nimport torch"),
        (
            "ops/linear.py",
            "from lsq.program import operation\nfrom . import rounding\nfrom ..gemm import product",
        ),
        ("native/loader.py", "import ctypes"),
        ("native/compiler.py", "from cuda.bindings import nvrtc"),
        ("dist/hooks.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("fairseq/task.py", "import fairseq\nfrom lsq.layers import Embedding"),
        (
            "commands/cli.py",
            "import torch.distributed\ntorch.distributed.init_process_group('gloo')",
        ),
        ("ops/linear.py", "import torch\ntorch._int_mm(x, y)\ntorch.__config__.show()"),
        (
            "ops/linear.py",
            "import torch\ntorch.gather(x, 0, i)\nx.scatter(0, i, y)\ntorch.distributed",
        ),
    ],
)
def test_allowed_import_passes(path, source):
    assert violations(path, source) == []
