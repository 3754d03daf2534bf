"""Files of tuned products: JSON with the validators of one device and its entries, one per line.

Files are not trusted. A file whose validators do not match is refused as a whole.
"""

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lsq.files import json_file
from lsq.files.json_file import check_choice, shown
from lsq.gemm.configuration import (
    ALGORITHM_BYTES,
    WGMMA_SM,
    Configuration,
    CpuConfiguration,
    CublasConfiguration,
    Entry,
    TileConfiguration,
    Times,
)
from lsq.gemm.device import CpuValidators, CudaValidators, Validators, check_format, difference
from lsq.gemm.product_key import ProductKey

_REMEDY = "correct or delete the file"


@dataclass(frozen=True, kw_only=True)
class ConfigurationFile:
    """The entries of one device, sorted by key.

    Raises:
        ValueError: two entries have the same key, or one does not suit the device.
    """

    validators: Validators
    entries: tuple[Entry, ...] = ()

    def __post_init__(self) -> None:
        numbers: dict[ProductKey, int] = {}
        for number, entry in enumerate(self.entries):
            configuration = entry.configuration
            if configuration.kind != self.validators.kind:
                raise ValueError(
                    f"entries[{number}].configuration is of kind {configuration.kind!r}; "
                    f"the file is of kind {self.validators.kind!r}"
                )
            wgmma = getattr(configuration, "instruction", None) == "wgmma"
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
        """This file with entries added, which replace those of the same key."""
        merged = {entry.key: entry for entry in [*self.entries, *entries]}
        return dataclasses.replace(self, entries=tuple(merged.values()))


def read(path: Path) -> ConfigurationFile:
    """Read a file.

    Raises:
        ValueError: it is no such file; the message says where, what stands there, and what is
            allowed.
        FileNotFoundError, OSError: there is none, or it cannot be read.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"there is no file {path} of tuned products; `lsq configs list` names all files, and"
            " `lsq tune` makes one"
        )
    return json_file.read(path, _file, _REMEDY)


def write(path: Path, file: ConfigurationFile) -> None:
    """Write a file, whole or not at all; make its folder if it is missing.

    Raises:
        OSError: it cannot be written.
    """
    validators = {"kind": file.validators.kind, **dataclasses.asdict(file.validators)}
    json_file.write(
        path, {"validators": validators}, "entries", [_fields(entry) for entry in file.entries]
    )


def _file(content: Any) -> ConfigurationFile:
    # The validators come first: of a later format nothing else can be judged.
    json_file.check_fields(content, ["validators", "entries"], "")
    validators = _validators(content["validators"], "validators")
    record = json_file.record
    entry = partial(
        record,
        Entry,
        key=partial(record, ProductKey),
        times=partial(record, Times),
        configuration={"cpu": _of_cpu, "cuda": _of_gpu}[validators.kind],
    )
    return ConfigurationFile(
        validators=validators, entries=json_file.sequence(content["entries"], "entries", entry)
    )


def _validators(value: Any, where: str) -> Validators:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {shown(value)}; it must be an object")
    fields = dict(value)
    try:
        check_format(fields.get("format"))
        check_choice("kind", fields.get("kind"), ("cpu", "cuda"))
    except ValueError as error:
        raise ValueError(json_file.within(where, str(error))) from None
    if fields.pop("kind") == "cpu":
        return json_file.record(CpuValidators, fields, where, features=_names)
    return json_file.record(CudaValidators, fields, where)


def _of_cpu(value: Any, where: str) -> Configuration:
    """The tiles of a CPU. Older files also say how oneDNN copies its operands."""
    if isinstance(value, dict):
        if value.get("kernel", "onednn") == "onednn":
            raise ValueError(
                f"{where} is for oneDNN, by which no product of a CPU runs any more: lsq's own"
                " tiles run all of them"
            )
        copies = [("a_layout", "as_is"), ("b_layout", "as_is")]
        value = {name: each for name, each in value.items() if (name, each) not in copies}
    return json_file.record(CpuConfiguration, value, where)


def _of_gpu(value: Any, where: str) -> Configuration:
    """A tile, or an algorithm of cuBLASLt, which alone has the field of that name."""
    if isinstance(value, dict) and "algorithm" not in value:
        return json_file.record(TileConfiguration, value, where)
    return json_file.record(CublasConfiguration, value, where, algorithm=_bytes)


def _names(value: Any, where: str) -> tuple[Any, ...]:
    return json_file.sequence(value, where, lambda item, _: item)


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
    """A file of the user's folder or of the package, or an explicitly named one, and whether it is
    used."""

    path: Path
    file: ConfigurationFile | None
    """None if it cannot be read."""
    refusal: str | None
    """Why it is not used for the device; None if it is."""
    shipped: bool = False
    """Whether it comes with lsq, where files for other devices are expected."""


PACKAGE_FOLDER = Path(__file__).parent / "configs"
"""Files that come with lsq."""


def user_folder() -> Path | None:
    """$XDG_CONFIG_HOME/lsq/gemm, by default ~/.config/lsq/gemm; None without a home."""
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(configured):  # the XDG specification: others are to be ignored
        return Path(configured, "lsq", "gemm")
    try:
        return Path.home() / ".config" / "lsq" / "gemm"
    except RuntimeError:
        return None


def search(here: Validators) -> list[SearchedFile]:
    """Every file of the user's folder, then of the package, with its refusal for a device."""
    user, results = user_folder(), []
    own = sorted(user.glob("*.json")) if user is not None and user.is_dir() else []
    for path in (*own, *sorted(PACKAGE_FOLDER.glob("*.json"))):
        file = None
        try:
            file = read(path)
            refusal = difference(file.validators, here)
        except (ValueError, OSError) as error:
            refusal = str(error).removeprefix(f"{path}: ")
        results.append(SearchedFile(path=path, file=file, refusal=refusal, shipped=path not in own))
    return results
