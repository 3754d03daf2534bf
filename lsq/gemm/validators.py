"""Which device the entries of a file hold for: plain, checked data."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from lsq.gemm.checks import check_text, check_whole, shown

FORMAT = 1
"""Of the files."""


@dataclass(frozen=True, kw_only=True)
class CpuValidators:
    """A CPU, and what multiplies on it. Entries hold where all of these are the same.

    Raises:
        ValueError: a value of the wrong type or out of range.
    """

    kind: ClassVar[str] = "cpu"

    format: int = FORMAT
    device: str
    """Model name."""
    features: tuple[str, ...]
    """The instruction sets that matter, sorted (lsq.csrc.processor.CPU_FEATURES)."""
    threads: int
    """Of torch."""
    library: str = "onednn"
    library_version: str

    def __post_init__(self) -> None:
        check_format(self.format)
        for name in ("device", "library", "library_version"):
            check_text(name, getattr(self, name))
        _check_features(self.features)
        check_whole("threads", self.threads, 1, 65536)


@dataclass(frozen=True, kw_only=True)
class CudaValidators:
    """A model of GPU, and the library that multiplies on it. Entries hold where all of these are the same.

    Raises:
        ValueError: a value of the wrong type or out of range.
    """

    kind: ClassVar[str] = "cuda"

    format: int = FORMAT
    device: str
    """Model name."""
    sm: int
    """Compute capability, e.g. 90."""
    multiprocessors: int
    library: str = "cublasLt"
    library_version: str
    """e.g. "13.0.2"."""

    def __post_init__(self) -> None:
        check_format(self.format)
        for name in ("device", "library", "library_version"):
            check_text(name, getattr(self, name))
        check_whole("sm", self.sm, 10, 9999)
        check_whole("multiprocessors", self.multiprocessors, 1, 65536)


Validators = CpuValidators | CudaValidators


def difference(file: Validators, here: Validators) -> str | None:
    """The first value in which a file's validators differ from this device's, in words; None where none does."""
    if file.kind != here.kind:
        return f"kind differs: the file is for {_named(file)}, here is {_named(here)}"
    for field in dataclasses.fields(here):
        theirs, ours = getattr(file, field.name), getattr(here, field.name)
        if theirs == ours:
            continue
        if field.name == "features":
            more, less = (" ".join(sorted(set(one) - set(other))) for one, other in ((theirs, ours), (ours, theirs)))
            return f"features differ: the file alone has {more or 'none'}, this CPU alone has {less or 'none'}"
        return f"{field.name} differs: the file says {shown(theirs)}, here it is {shown(ours)}"
    return None


def _named(validators: Validators) -> str:
    return f"the {'CPU' if validators.kind == 'cpu' else 'GPU'} {shown(validators.device)}"


def check_format(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value != FORMAT:
        raise ValueError(f"format is {shown(value)}; this version of lsq reads format {FORMAT}: tune again with it")


def _check_features(value: object) -> None:
    if not isinstance(value, tuple) or len(value) > 100:
        raise ValueError(f"features is {shown(value)}; it must be a list of at most 100 names")
    for place, name in enumerate(value):
        check_text(f"features[{place}]", name)
    if list(value) != sorted(set(value)):
        raise ValueError(f"features is {shown(value)}; the names must be sorted, each once")
