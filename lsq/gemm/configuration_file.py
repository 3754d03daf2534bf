"""Files of tuned products: JSON with the validators of one GPU and its entries, one per line.

Files are not trusted. A file is refused as a whole if its validators do not match.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lsq.files import json_file
from lsq.files.json_file import check_text, check_whole, shown
from lsq.gemm.configuration import (
    ALGORITHM_BYTES,
    WGMMA_SM,
    Configuration,
    CublasConfiguration,
    Entry,
    TileConfiguration,
    Times,
)
from lsq.gemm.product_key import ProductKey
from lsq.native import compiler
from lsq.native.products import ProductLibrary, find_cublaslt

FORMAT = 3

_REMEDY = "correct or delete the file"


@dataclass(frozen=True, kw_only=True)
class Validators:
    """A GPU model and its libcublasLt; entries are valid where all fields are equal. Raises
    ValueError: a value has the wrong type or is out of range."""

    format: int = FORMAT
    device: str
    """Model name."""
    library: str = "cublasLt"
    library_version: str
    """Such as "13.0.2"."""
    sm: int
    """Compute capability, e.g. 90."""
    multiprocessors: int

    def __post_init__(self) -> None:
        _check_format(self.format)
        for name in ("device", "library", "library_version"):
            check_text(name, getattr(self, name))
        check_whole("sm", self.sm, 10, 9999)
        check_whole("multiprocessors", self.multiprocessors, 1, 65536)


def _check_format(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value != FORMAT:
        raise ValueError(
            f"format is {shown(value)}; this version of lsq reads format {FORMAT}: tune again with"
            " it"
        )


def difference(file: Validators, here: Validators) -> str | None:
    """Describe the first value in which a file's validators differ from this GPU's, if any."""
    for name, ours in vars(here).items():
        theirs = getattr(file, name)
        if theirs != ours:
            return f"{name} differs: the file says {shown(theirs)}, here it is {shown(ours)}"
    return None


def here() -> Validators:
    """Return the validators of the current GPU and the installed libcublasLt. Raises RuntimeError:
    there is no GPU, or no library."""
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch sees no GPU here; {compiler.remedy()}, or use the CPU")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    name = "".join(letter for letter in properties.name if letter.isprintable()).strip()
    return Validators(
        device=name[:200] or "unknown",
        sm=10 * properties.major + properties.minor,
        multiprocessors=properties.multi_processor_count,
        library_version=_cublaslt_version(),
    )


@functools.cache
def _cublaslt_version() -> str:
    library = ProductLibrary(find_cublaslt())
    try:
        return library.version()
    finally:
        library.close()


def file_name(validators: Validators) -> str:
    """Return the default name of a GPU's file, e.g. NVIDIA_H200.json."""
    return (re.sub(r"[^A-Za-z0-9]+", "_", validators.device).strip("_") or "unknown") + ".json"


@dataclass(frozen=True, kw_only=True)
class ConfigurationFile:
    """The entries of one GPU, sorted by key. Raises ValueError: two entries have the same key, or
    an entry does not suit the GPU."""

    validators: Validators
    entries: tuple[Entry, ...] = ()

    def __post_init__(self) -> None:
        numbers: dict[ProductKey, int] = {}
        for number, entry in enumerate(self.entries):
            wgmma = getattr(entry.configuration, "instruction", None) == "wgmma"
            if wgmma and self.validators.sm != WGMMA_SM:
                raise ValueError(
                    f"entries[{number}].configuration.instruction is 'wgmma', which only GPUs of sm"
                    f" {WGMMA_SM} have; the file is for sm {self.validators.sm}: tune again"
                )
            if numbers.setdefault(entry.key, number) != number:
                raise ValueError(
                    f"entries[{number}].key is {entry.key}, which entries[{numbers[entry.key]}] has"
                    " already; remove one"
                )
        object.__setattr__(self, "entries", tuple(sorted(self.entries, key=_order)))

    def with_entries(self, entries: Iterable[Entry]) -> "ConfigurationFile":
        merged = {entry.key: entry for entry in [*self.entries, *entries]}
        return dataclasses.replace(self, entries=tuple(merged.values()))


def read(path: Path) -> ConfigurationFile:
    """Read a file. Raises ValueError: it is wrong; the message says where, and what is allowed;
    FileNotFoundError: it does not exist; OSError: it cannot be read."""
    if not path.exists():
        raise FileNotFoundError(
            f"there is no file {path} of tuned products; `lsq configs list` names all files, and"
            " `lsq tune` makes one"
        )
    return json_file.read(path, _file, _REMEDY)


def write(path: Path, file: ConfigurationFile) -> None:
    """Write a file whole or not at all; make its folder if needed. Raises OSError: that fails."""
    validators = {"kind": "cuda", **dataclasses.asdict(file.validators)}
    json_file.write(
        path, {"validators": validators}, "entries", [_fields(entry) for entry in file.entries]
    )


def _file(content: Any) -> ConfigurationFile:
    # The validators come first: a file of a later format cannot be checked further.
    json_file.check_fields(content, ["validators", "entries"], "")
    validators = _validators(content["validators"], "validators")
    record = json_file.record
    entry = partial(
        record,
        Entry,
        key=partial(record, ProductKey),
        times=partial(record, Times),
        configuration=_configuration,
    )
    return ConfigurationFile(
        validators=validators, entries=json_file.sequence(content["entries"], "entries", entry)
    )


def _validators(value: Any, where: str) -> Validators:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {shown(value)}; it must be an object")
    fields = dict(value)
    try:
        _check_format(fields.get("format"))
        kind = fields.pop("kind", None)
        if kind == "cpu":
            raise ValueError(
                "kind is 'cpu', but products of CPUs run by a rule: leave the file out"
            )
        json_file.check_choice("kind", kind, ("cuda",))
    except ValueError as error:
        raise ValueError(json_file.within(where, str(error))) from None
    return json_file.record(Validators, fields, where)


def _configuration(value: Any, where: str) -> Configuration:
    """Make a tile, or an algorithm of cuBLASLt: only the latter has the field `algorithm`."""
    if isinstance(value, dict) and "algorithm" not in value:
        return json_file.record(TileConfiguration, value, where)
    return json_file.record(CublasConfiguration, value, where, algorithm=_bytes)


def _bytes(value: Any, where: str) -> bytes:
    digits = 2 * ALGORITHM_BYTES
    try:
        if isinstance(value, str) and len(value) == digits and value == value.strip():
            return bytes.fromhex(value)
    except ValueError:
        pass
    raise ValueError(f"{where} is {shown(value)}; it must be {digits} hexadecimal digits")


def _fields(entry: Entry) -> dict[str, Any]:
    configuration = dict(vars(entry.configuration))
    if "algorithm" in configuration:
        configuration["algorithm"] = configuration["algorithm"].hex()
    times = {name: time for name, time in vars(entry.times).items() if time is not None}
    nested = {"key": entry.key.fields(), "configuration": configuration, "times": times}
    return {**nested, "spread": entry.spread, "date": entry.date}


def _order(entry: Entry) -> tuple:
    return tuple(-1 if value is None else value for value in vars(entry.key).values())


@dataclass(frozen=True, kw_only=True)
class SearchedFile:
    """A file that was named or found in the user's folder or the package, and whether it is
    used."""

    path: Path
    file: ConfigurationFile | None
    """None: it cannot be read."""
    refusal: str | None
    """Why it is not used here; None: it is used."""
    shipped: bool = False
    """Whether it comes with lsq, whose files are for many devices."""


PACKAGE_FOLDER = Path(__file__).parent / "configs"
"""Files that come with lsq."""


def user_folder() -> Path | None:
    """Return $XDG_CONFIG_HOME/lsq/gemm, by default ~/.config/lsq/gemm; None: no home folder."""
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(configured):  # the XDG specification ignores relative paths
        return Path(configured, "lsq", "gemm")
    try:
        return Path.home() / ".config" / "lsq" / "gemm"
    except RuntimeError:
        return None


def search(gpu: Validators | str) -> list[SearchedFile]:
    """Find every file of the user's folder, then of the package. `gpu`: its validators, or why
    there is no GPU, which then refuses all files."""
    user, results = user_folder(), []
    own = sorted(user.glob("*.json")) if user is not None and user.is_dir() else []
    for path in (*own, *sorted(PACKAGE_FOLDER.glob("*.json"))):
        file = None
        try:
            file = read(path)
            refusal = gpu if isinstance(gpu, str) else difference(file.validators, gpu)
        except (ValueError, OSError) as error:
            refusal = str(error).removeprefix(f"{path}: ")
        results.append(SearchedFile(path=path, file=file, refusal=refusal, shipped=path not in own))
    return results
