"""The device for which the entries of a file hold: checked data."""

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import ClassVar

import torch

from lsq.files.json_file import check_text, check_whole, shown
from lsq.native import processor

FORMAT = 2
"""Of the files."""


@dataclass(frozen=True, kw_only=True)
class Validators:
    """A device and its library of products. Entries hold where all of these are the same.

    Raises:
        ValueError: a value of the wrong type or out of range.
    """

    kind: ClassVar[str]

    format: int = FORMAT
    device: str
    """Model name."""
    library: str
    library_version: str

    def __post_init__(self) -> None:
        check_format(self.format)
        for name in ("device", "library", "library_version"):
            check_text(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class CpuValidators(Validators):
    """A CPU, with the oneDNN in torch."""

    kind: ClassVar[str] = "cpu"

    library: str = "onednn"
    features: tuple[str, ...]
    """The instruction sets that matter, sorted (lsq.native.processor.CPU_FEATURES)."""
    threads: int
    """Of torch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.features, tuple) or len(self.features) > 100:
            raise ValueError(
                f"features is {shown(self.features)}; it must be a list of at most 100 names"
            )
        for number, name in enumerate(self.features):
            check_text(f"features[{number}]", name)
        if list(self.features) != sorted(set(self.features)):
            raise ValueError(
                f"features is {shown(self.features)}; the names must be sorted, each once"
            )
        check_whole("threads", self.threads, 1, 65536)


@dataclass(frozen=True, kw_only=True)
class CudaValidators(Validators):
    """A model of GPU, with its libcublasLt, whose version is like "13.0.2"."""

    kind: ClassVar[str] = "cuda"

    library: str = "cublasLt"
    sm: int
    """Compute capability, e.g. 90."""
    multiprocessors: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("sm", self.sm, 10, 9999)
        check_whole("multiprocessors", self.multiprocessors, 1, 65536)


def check_format(value: object) -> None:
    """Raise ValueError if a file is of another version of lsq."""
    if not isinstance(value, int) or isinstance(value, bool) or value != FORMAT:
        raise ValueError(
            f"format is {shown(value)}; this version of lsq reads format {FORMAT}: tune again with"
            " it"
        )


def difference(file: Validators, here: Validators) -> str | None:
    """The first value in which a file's validators differ from this device's, in words."""
    if file.kind != here.kind:
        return f"kind differs: the file is for {_named(file)}, here is {_named(here)}"
    for field in dataclasses.fields(here):
        theirs, ours = getattr(file, field.name), getattr(here, field.name)
        if theirs == ours:
            continue
        if field.name == "features":
            more, less = set(theirs) - set(ours), set(ours) - set(theirs)
            return (
                f"features differ: the file alone has {' '.join(sorted(more)) or 'none'}, this CPU"
                f" alone has {' '.join(sorted(less)) or 'none'}"
            )
        return f"{field.name} differs: the file says {shown(theirs)}, here it is {shown(ours)}"
    return None


def _named(validators: Validators) -> str:
    return f"the {'CPU' if validators.kind == 'cpu' else 'GPU'} {shown(validators.device)}"


def here(kind: str = "cpu") -> Validators:
    """The validators of the CPU, or of the current GPU with the installed libcublasLt.

    Raises:
        ValueError: no such kind.
        RuntimeError: there is no GPU, or no library.
    """
    if kind == "cpu":
        return CpuValidators(
            device=_printable(processor.cpu_model()),
            features=tuple(sorted(processor.cpu_features() & set(processor.CPU_FEATURES))),
            threads=torch.get_num_threads(),
            library_version=onednn_version(),
        )
    if kind != "cuda":
        raise ValueError(f'kind is {kind!r}; allowed: "cpu", "cuda"')
    if not torch.cuda.is_available():
        from lsq.native import compiler

        raise RuntimeError(f"torch sees no GPU here; {compiler.remedy()}, or use the CPU")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return CudaValidators(
        device=_printable(properties.name),
        sm=10 * properties.major + properties.minor,
        multiprocessors=properties.multi_processor_count,
        library_version=_cublaslt_version(),
    )


@functools.cache
def onednn_version() -> str:
    """Of the oneDNN in torch, e.g. "3.12.0"; "none" if torch was built without."""
    found = re.search(r"(?:MKL-DNN|oneDNN) v(\d[\w.]*)", torch.__config__.show())
    return found[1] if found else "none"


@functools.cache
def _cublaslt_version() -> str:
    from lsq.native.products import ProductLibrary, find_cublaslt  # for GPUs alone

    library = ProductLibrary(find_cublaslt())
    try:
        return library.version()
    finally:
        library.close()


def file_name(validators: Validators) -> str:
    """The default name of a device's file, e.g. NVIDIA_H200.json, AMD_EPYC_2_threads.json."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", validators.device).strip("_") or "unknown"
    threads = f"_{validators.threads}_threads" if validators.kind == "cpu" else ""
    return f"{name}{threads}.json"


def _printable(name: str) -> str:
    return "".join(letter for letter in name if letter.isprintable()).strip()[:200] or "unknown"
