"""Files of tuned products, JSON: the validators of one device, and its entries, one per line. Files are not trusted."""

import dataclasses
from pathlib import Path
from typing import Any

from lsq.gemm import json_file
from lsq.gemm.checks import check_choice, shown
from lsq.gemm.configuration import (
    ALGORITHM_BYTES,
    Configuration,
    ConfigurationFile,
    CpuConfiguration,
    CublasConfiguration,
    Entry,
    Times,
)
from lsq.gemm.product_key import ProductKey
from lsq.gemm.validators import CpuValidators, CudaValidators, Validators, check_format

_VALIDATORS = {made.kind: made for made in (CpuValidators, CudaValidators)}
_REMEDY = "correct or delete the file, or make it again with `lsq tune`"


def read(path: Path) -> ConfigurationFile:
    """Read what `write` wrote, or somebody edited.

    Raises:
        ValueError: it is not such a file; the message says where, what stands there, and what is allowed.
        OSError: it cannot be read.
    """
    return json_file.read(path, _file, _REMEDY)


def write(path: Path, file: ConfigurationFile) -> None:
    """Write a file, whole or not at all; its folder is made where it is missing.

    Raises:
        OSError: it cannot be written.
    """
    validators = {"kind": file.validators.kind, **dataclasses.asdict(file.validators)}
    json_file.write(path, {"validators": validators}, "entries", [_entry_fields(entry) for entry in file.entries])


def _file(content: Any) -> ConfigurationFile:
    # The validators come first: of a later format nothing else can be judged.
    json_file.check_fields(content, ["validators", "entries"], "")
    validators = _validators(content["validators"], "validators")
    configuration = {"cpu": _cpu_configuration, "cuda": _cublas_configuration}[validators.kind]

    def entry(value: Any, place: str) -> Entry:
        return json_file.record(
            Entry, value, place, key=product_key, configuration=configuration, times=_times
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
        check_choice("kind", fields.get("kind"), _VALIDATORS)
    except ValueError as error:
        raise ValueError(json_file.within(place, str(error))) from None
    made = _VALIDATORS[fields.pop("kind")]
    lists = {"features": _texts} if made is CpuValidators else {}
    return json_file.record(made, fields, place, **lists)


def _texts(value: Any, place: str) -> tuple[Any, ...]:
    return json_file.sequence(value, place, lambda item, _: item)


def product_key(value: Any, place: str) -> ProductKey:
    """The key of a product from its fields, as json_file.record's converter.

    Raises:
        ValueError: it is none.
    """
    return json_file.record(ProductKey, value, place)


def _cpu_configuration(value: Any, place: str) -> Configuration:
    return json_file.record(CpuConfiguration, value, place)


def _cublas_configuration(value: Any, place: str) -> Configuration:
    return json_file.record(CublasConfiguration, value, place, algorithm=_bytes)


def _times(value: Any, place: str) -> Times:
    return json_file.record(Times, value, place)


def _bytes(value: Any, place: str) -> bytes:
    digits = 2 * ALGORITHM_BYTES
    try:
        if isinstance(value, str) and len(value) == digits and value == value.strip():
            return bytes.fromhex(value)
    except ValueError:
        pass
    raise ValueError(f"{place} is {shown(value)}; it must be {digits} hexadecimal digits")


def _entry_fields(entry: Entry) -> dict[str, Any]:
    fields = dataclasses.asdict(entry)
    configuration = fields["configuration"]
    if isinstance(entry.configuration, CublasConfiguration):
        configuration["algorithm"] = configuration["algorithm"].hex()
    return fields
