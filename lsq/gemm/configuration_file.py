"""Files of tuned products: JSON with the validators of one device and its entries, one per line.

They are not trusted.

Files that are named explicitly are the only ones then. Otherwise the user's folder goes before the
package's own, entry
by entry: what one file lacks is taken from the next. A file whose validators do not match is
    refused as a whole.
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

PACKAGE_FOLDER = Path(__file__).parent / "configs"
_REMEDY = "correct or delete the file, or make it again with `lsq tune`"


@dataclass(frozen=True, kw_only=True)
class ConfigurationFile:
    """The entries of one device, sorted by key.

    Raises:
        ValueError: two entries have the same key, or one is of another kind of device or wants what
            it has not.
    """

    validators: Validators
    entries: tuple[Entry, ...] = ()

    def __post_init__(self) -> None:
        places: dict[ProductKey, int] = {}
        for place, entry in enumerate(self.entries):
            if entry.configuration.kind != self.validators.kind:
                raise ValueError(
                    f"entries[{place}].configuration is of kind {entry.configuration.kind!r}; "
                    f"the file is of kind {self.validators.kind!r}"
                )
            if (
                getattr(entry.configuration, "instruction", None) == "wgmma"
                and self.validators.sm != WGMMA_SM
            ):
                raise ValueError(
                    f"entries[{place}].configuration.instruction is 'wgmma', which GPUs of sm"
                    f" {WGMMA_SM} alone have; "
                    f"the file is for sm {self.validators.sm}: tune again"
                )
            if places.setdefault(entry.key, place) != place:
                raise ValueError(
                    f"entries[{place}].key is {entry.key}, which entries[{places[entry.key]}] has"
                    " already; remove one"
                )
        object.__setattr__(self, "entries", tuple(sorted(self.entries, key=_order)))

    def with_entries(self, entries: Iterable[Entry]) -> "ConfigurationFile":
        """This file with entries added, which replace those of the same key."""
        merged = {entry.key: entry for entry in [*self.entries, *entries]}
        return dataclasses.replace(self, entries=tuple(merged.values()))


def read(path: Path) -> ConfigurationFile:
    """Read what `write` wrote, or somebody edited.

    Raises:
        ValueError: it is not such a file; the message says where, what stands there, and what is
            allowed.
        FileNotFoundError, OSError: there is none, or it cannot be read.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"there is no file {path} of tuned products; `lsq configs list` names those that there"
            " are, and `lsq tune` "
            "makes one"
        )
    return json_file.read(path, _file, _REMEDY)


def write(path: Path, file: ConfigurationFile) -> None:
    """Write a file, whole or not at all; its folder is made where it is missing.

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
    configurations = {"cpu": partial(record, CpuConfiguration), "cuda": _of_gpu}
    entry = partial(
        record,
        Entry,
        key=partial(record, ProductKey),
        times=partial(record, Times),
        configuration=configurations[validators.kind],
    )
    return ConfigurationFile(
        validators=validators, entries=json_file.sequence(content["entries"], "entries", entry)
    )


def _validators(value: Any, place: str) -> Validators:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {shown(value)}; it must be an object")
    fields = dict(value)
    try:
        check_format(fields.get("format"))
        check_choice("kind", fields.get("kind"), ("cpu", "cuda"))
    except ValueError as error:
        raise ValueError(json_file.within(place, str(error))) from None
    if fields.pop("kind") == "cpu":
        return json_file.record(CpuValidators, fields, place, features=_names)
    return json_file.record(CudaValidators, fields, place)


def _of_gpu(value: Any, place: str) -> Configuration:
    """A tile, or an algorithm of cuBLASLt, which alone has the field of that name."""
    if isinstance(value, dict) and "algorithm" not in value:
        return json_file.record(TileConfiguration, value, place)
    return json_file.record(CublasConfiguration, value, place, algorithm=_bytes)


def _names(value: Any, place: str) -> tuple[Any, ...]:
    return json_file.sequence(value, place, lambda item, _: item)


def _bytes(value: Any, place: str) -> bytes:
    digits = 2 * ALGORITHM_BYTES
    try:
        if isinstance(value, str) and len(value) == digits and value == value.strip():
            return bytes.fromhex(value)
    except ValueError:
        pass
    raise ValueError(f"{place} is {shown(value)}; it must be {digits} hexadecimal digits")


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
class Found:
    """A file, and what became of it."""

    path: Path
    source: str
    """"explicit", "user" or "package"."""
    file: ConfigurationFile | None
    """Its content; None where it cannot be read."""
    refusal: str | None
    """Why it does not hold for the device; None where it does."""


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


def find(here: Validators) -> list[Found]:
    """Every file where files are searched, and whether it holds for a device; what is wrong with it
    is its refusal."""
    found = []
    for source, path in paths():
        file = None
        try:
            file = read(path)
            refusal = difference(file.validators, here)
        except (ValueError, OSError) as error:
            refusal = str(error).removeprefix(f"{path}: ")
        found.append(Found(path=path, source=source, file=file, refusal=refusal))
    return found
