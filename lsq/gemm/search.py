"""Which files of tuned products there are, and which of them hold for this device.

Files that are named explicitly are the only ones then. Otherwise the user's folder goes before the package's own, entry
by entry: what one file lacks is taken from the next. A file whose validators do not match is refused as a whole.
"""

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lsq.csrc import processor
from lsq.csrc.find import find_cublaslt
from lsq.csrc.products import ProductLibrary
from lsq.gemm import configuration_file
from lsq.gemm.configuration import ConfigurationFile
from lsq.gemm.validators import CpuValidators, CudaValidators, Validators, difference

PACKAGE_FOLDER = Path(__file__).parent / "configs"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A file, and what became of it."""

    path: Path
    source: str
    """"explicit", "user" or "package"."""
    file: ConfigurationFile | None
    """Its content; None where it cannot be read."""
    refusal: str | None
    """Why it does not hold for the device; None where it does."""
    foreign: bool = False
    """Whether it was made for another device altogether, as most files of the package are."""


def user_folder() -> Path | None:
    """$XDG_CONFIG_HOME/lsq/gemm, by default ~/.config/lsq/gemm; None where there is no home."""
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(configured):  # the XDG specification: others are to be ignored
        return Path(configured, "lsq", "gemm")
    try:
        return Path.home() / ".config" / "lsq" / "gemm"
    except RuntimeError:
        return None


def paths() -> list[tuple[str, Path]]:
    """(source, path) of all files where files are searched, in the order of their precedence."""
    folders = {"user": user_folder(), "package": PACKAGE_FOLDER}
    return [
        (source, path)
        for source, folder in folders.items()
        if folder is not None and folder.is_dir()
        for path in sorted(folder.glob("*.json"))
    ]


def find(here: Validators, explicit: Sequence[Path] | None = None) -> list[Found]:
    """Look at every file.

    Args:
        here: the device.
        explicit: the files to look at, all of which must hold; None: those of `paths()`.

    Raises:
        ValueError: an explicit file is damaged, or was made for something else; the message names what differs.
        OSError: an explicit file cannot be read.
    """
    if explicit is None:
        return [look(path, source, here) for source, path in paths()]
    found = []
    for path in explicit:
        file = configuration_file.read(path)
        each = _judged(path, "explicit", file, here)
        if each.refusal is not None:
            raise ValueError(f"{path}: {each.refusal}; tune here (`lsq tune`), or leave the file out")
        found.append(each)
    return found


def look(path: Path, source: str, here: Validators) -> Found:
    """Read one file; what is wrong with it is its refusal."""
    try:
        file = configuration_file.read(path)
    except (ValueError, OSError) as error:
        return Found(path=path, source=source, file=None, refusal=str(error).removeprefix(f"{path}: "))
    return _judged(path, source, file, here)


def _judged(path: Path, source: str, file: ConfigurationFile, here: Validators) -> Found:
    theirs = file.validators
    foreign = theirs.kind != here.kind or theirs.device != here.device
    return Found(path=path, source=source, file=file, refusal=difference(theirs, here), foreign=foreign)


def here(kind: str = "cpu", device: torch.device | None = None) -> Validators:
    """The validators of the CPU, or of a GPU (the current one unless given) with the libcublasLt that is installed.

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
        raise RuntimeError(
            "torch sees no GPU here; install the NVIDIA driver and a CUDA build of PyTorch, or use the CPU"
        )
    properties = torch.cuda.get_device_properties(device)
    return CudaValidators(
        device=_printable(properties.name),
        sm=10 * properties.major + properties.minor,
        multiprocessors=properties.multi_processor_count,
        library_version=_cublaslt_version(),
    )


@functools.cache
def onednn_version() -> str:
    """Of the oneDNN in torch, e.g. "3.12.0"; "none" where torch was built without."""
    found = re.search(r"(?:MKL-DNN|oneDNN) v(\d[\w.]*)", torch.__config__.show())
    return found[1] if found else "none"


@functools.cache
def _cublaslt_version() -> str:
    library = ProductLibrary(find_cublaslt())
    try:
        return version_text(library.version())
    finally:
        library.close()


def version_text(number: int) -> str:
    """cuBLASLt's number of its version, 10000 * major + 100 * minor + patch, as "major.minor.patch"."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def file_name(validators: Validators) -> str:
    """What a device's file is called unless said otherwise, e.g. NVIDIA_H200.json, AMD_EPYC_2_threads.json."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", validators.device).strip("_") or "unknown"
    return f"{name}_{validators.threads}_threads.json" if validators.kind == "cpu" else f"{name}.json"


def _printable(name: str) -> str:
    """The name of a device as it may stand in a file."""
    return "".join(letter for letter in name if letter.isprintable()).strip()[:200] or "unknown"
