"""Optional packages (the extras in pyproject.toml), how to install them, and lazy imports."""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata, util
from urllib.parse import urlsplit
from urllib.request import url2pathname

DISTRIBUTION = "lsq-int8"
"""Name of the installed distribution. It is not on PyPI, where `lsq` is an unrelated project."""
REQUIRED = ("torch", "numpy", "safetensors", "filelock", "tqdm")


@dataclass(frozen=True)
class Extra:
    """An optional group of packages."""

    purpose: str
    packages: dict[str, str]
    """Package -> module whose presence shows that the package is installed."""
    others: tuple[str, ...] = ()
    """Further modules that these packages install."""

    @property
    def modules(self) -> set[str]:
        return {*self.packages.values(), *self.others}


EXTRAS = {
    "huggingface": Extra(
        "models of Hugging Face", {"transformers": "transformers", "accelerate": "accelerate"}
    ),
    "fairseq": Extra(
        "training in fairseq", {"fairseq-fixed": "fairseq"}, ("fairseq_cli", "omegaconf", "hydra")
    ),
    "text": Extra(
        "vocabularies, number names and BLEU",
        {name: name for name in ("sacrebleu", "sentencepiece", "num2words")},
    ),
    "serve": Extra(
        "translations over HTTP, `lsq serve`",
        {"uvicorn": "uvicorn", "starlette": "starlette", "prometheus-client": "prometheus_client"},
    ),
    "study": Extra(
        "studies of formats, tables, pictures and TensorBoard",
        {name: name for name in ("matplotlib", "tabulate", "tensorboard", "scipy")},
    ),
    "reinforcement": Extra(
        "searches for formats by reinforcement learning",
        {"stable-baselines3": "stable_baselines3"},
        ("gymnasium",),
    ),
    "ctranslate2": Extra("`lsq export --to ctranslate2`", {"ctranslate2": "ctranslate2"}),
    "graphs": Extra(
        "batches of graphs, cut by METIS",
        {name: name for name in ("torch_geometric", "pymetis")},
    ),
    "cuda13": Extra(
        "kernels on a GPU",
        {
            "cuda-bindings": "cuda.bindings",
            "nvidia-cuda-nvrtc": "nvidia.cu13",
            "nvidia-cublas": "nvidia.cu13",
        },
        ("cuda", "nvidia"),
    ),
}
"""Extra -> its packages. `dev`, for tests of lsq, is left out."""


class MissingPackage(ModuleNotFoundError):
    """Packages of extras are not installed; the message says how to install them."""


def require(user: str, *extras: str) -> None:
    """Raise MissingPackage, naming `user`, unless the packages of these extras are installed."""
    missing, lacking = [], []
    for extra in extras:
        absent = [name for name, module in EXTRAS[extra].packages.items() if not _is_there(module)]
        missing += absent
        lacking += [extra] if absent else []
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise MissingPackage(
            f"{user} needs {', '.join(missing)}, which {verb} not installed: {command(*lacking)}"
        )


def _is_there(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not installed
        return False


def explanation(module: str) -> str:
    """Return the package that an import of `module` needs, and how to install it."""
    root = module.partition(".")[0]
    for name, extra in EXTRAS.items():
        if root in extra.modules:
            by_module = {known: package for package, known in extra.packages.items()}
            package = by_module.get(root, next(iter(extra.packages)))
            return f"{package}, which is not installed: {command(name)}"
    return f"{root}, which is not installed: pip install {root}"


def command(*extras: str) -> str:
    """Return the pip command that adds extras to the installed checkout or wheel. If pip recorded
    no origin, it names the current folder: run it in the checkout."""
    origin = _origin()
    editable = origin.get("dir_info", {}).get("editable", False)
    path = url2pathname(urlsplit(origin["url"]).path) if origin else "."
    options = "--no-build-isolation --editable " if editable else ""
    return f"pip install {options}{shlex.quote(path + '[' + ','.join(extras) + ']')}"


def _origin() -> dict:
    """Return pip's record of the origin of lsq (PEP 610), or {}. A checkout on sys.path has
    metadata without a record, so all installed distributions are searched."""
    installed = metadata.distributions(name=DISTRIBUTION)
    records = (found.read_text("direct_url.json") for found in installed)
    return json.loads(next(filter(None, records), "{}"))


def lazily(package: str, files: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package that imports its names when they are first used.

    Args:
        package: the package's `__name__`.
        files: name -> module of the package that defines it.
    """

    def getter(name: str) -> object:
        if name in files:
            return getattr(import_module(f"{package}.{files[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getter
