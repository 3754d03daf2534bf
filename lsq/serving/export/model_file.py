"""lsq's own file of a model to decode with: one safetensors file, whose codes are mapped, and
checked when it is read.

Its tensors are those of a DecodingModel; of codes that are 2:4 sparse, what
lsq/serving/export/sparse_codes.py says. Architecture, vocabularies and sentencepiece's model are in
the metadata, a text for each name. Checksums are CRC-32: of each tensor, and of all metadata.
"""

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

import lsq
from lsq import files
from lsq.serving.decode import SearchOptions
from lsq.serving.decode.architecture import MOST, Architecture
from lsq.serving.decode.model import DecodingModel
from lsq.serving.export import sparse_codes

KIND = "lsq model "
FORMAT, SPARSE_FORMAT = FORMATS = (KIND + "1", KIND + "2")
"""That of a file, without and with sparse codes, which an older lsq does not know."""
CHECKSUM = "checksum"
"""Of the metadata, in the metadata."""
FORMAT_NAME, CHECKSUMS, VERSION = "format", "tensors", "lsq"


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportedModel:
    """A model and what it takes to translate text with it.

    Raises:
        ValueError: the vocabularies do not fit the model, or a value is out of its range.
    """

    model: DecodingModel
    source: tuple[str, ...] | None
    """The words by number; None: it is a language model."""
    target: tuple[str, ...]
    subwords: bytes | None = None
    """sentencepiece's model; None: texts are words with spaces between them."""
    trained_length: int | None = None
    """Words of the longest sentence that it was trained with, without the end of the sentence, if
    that is known."""
    search: SearchOptions = SearchOptions()
    """How the training itself translated, as far as that is known."""

    def __post_init__(self) -> None:
        stacks = self.model.architecture.stacks
        for side, words in (("encoder", self.source), ("decoder", self.target)):
            wanted = stacks[side].words if side in stacks else 0
            if len(words or ()) != wanted:
                raise ValueError(
                    f"the {side} has {wanted} words, and its vocabulary {len(words or ())}"
                )
            if len(set(words or ())) != wanted:
                raise ValueError(f"a word is twice in the vocabulary of the {side}")
        if self.trained_length is not None and not 1 <= self.trained_length <= MOST:
            raise ValueError(
                f"trained_length is {self.trained_length}; it must be from 1 to {MOST}"
            )


def is_model_file(path: Path) -> bool:
    """Whether a file begins as safetensors do, and so is none of PyTorch's."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def is_exported(path: Path) -> bool:
    """Whether something is a file of `write`, of this version or another one; its tensors are not
    looked at."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get(FORMAT_NAME, "").startswith(KIND)
    except (OSError, SafetensorError):
        return False


def write(path: Path, exported: ExportedModel) -> None:
    """Write the file, whole or not at all.

    Raises:
        ValueError: a tensor holds NaN or infinity.
        OSError: it cannot be written.
    """
    tensors = dict(exported.model.tensors)
    if not exported.model.architecture.decoder.config.quant.weights.packed:
        tensors = sparse_codes.split(tensors)
    is_dense = tensors.keys() == exported.model.tensors.keys()
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(
                f"{name} holds NaN or infinity; export another checkpoint of the training"
            )
    metadata = {
        FORMAT_NAME: FORMAT if is_dense else SPARSE_FORMAT,
        VERSION: lsq.__version__,
        "architecture": exported.model.architecture.to_json(),
        "source": json.dumps(exported.source),
        "target": json.dumps(exported.target),
        "subwords": ""
        if exported.subwords is None
        else base64.b64encode(exported.subwords).decode(),
        "trained_length": json.dumps(exported.trained_length),
        "search": json.dumps(asdict(exported.search)),
        CHECKSUMS: json.dumps({name: checksum(tensor) for name, tensor in tensors.items()}),
    }
    metadata[CHECKSUM] = checksum_of_texts(metadata)
    files.write(path, lambda file: file.write(save(tensors, metadata)))


def read(path: Path) -> ExportedModel:
    """Read a model; every tensor is read once, for its checksum.

    Codes are mapped, but for sparse ones: the file must stay as it is until they are in use
    elsewhere, as the engine packs them. What is used as it is, all floats, is copied. `write` puts
    another file in the place of this one, which then goes on.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        ValueError: it is damaged, of another version, or another file.
    """
    if not path.is_file():
        raise (
            IsADirectoryError(21, "is a folder", str(path))
            if path.is_dir()
            else FileNotFoundError(2, "is not there", str(path))
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            return _model(metadata, {name: _kept(file.get_tensor(name)) for name in file.keys()})
    except (SafetensorError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{path} is damaged or no model of `lsq export`: {str(error)[:300]}"
        ) from error


def _kept(mapped: Tensor) -> Tensor:
    return mapped.clone() if mapped.is_floating_point() else mapped


def _model(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> ExportedModel:
    found = metadata.get(FORMAT_NAME, "")
    if found not in FORMATS:
        raise ValueError(
            f"its format is {found[:40]!r}, not {' or '.join(map(repr, FORMATS))}; export the model"
            " again"
        )
    rest = {name: text for name, text in metadata.items() if name != CHECKSUM}
    if metadata.get(CHECKSUM) != checksum_of_texts(rest):
        raise ValueError("the checksum of its metadata does not fit")
    whole = sparse_codes.join(tensors) if found == SPARSE_FORMAT else tensors
    model = DecodingModel(
        architecture=Architecture.from_json(rest.get("architecture", "")), tensors=whole
    )
    wanted = _read(rest, CHECKSUMS, dict)
    for name, tensor in tensors.items():
        if wanted.get(name) != checksum(tensor):
            raise ValueError(f"the checksum of {name} does not fit")
    length = _read(rest, "trained_length", int | None)
    return ExportedModel(
        model=model,
        source=_words(rest, "source"),
        target=_words(rest, "target") or (),
        subwords=base64.b64decode(rest.get("subwords", "")) or None,
        trained_length=length,
        search=_search(rest, length),
    )


def _search(metadata: Mapping[str, str], trained_length: int | None) -> SearchOptions:
    """The options of the search; earlier files have the longest translation alone."""
    if "search" not in metadata:
        return (
            SearchOptions() if trained_length is None else SearchOptions(max_len_b=trained_length)
        )
    try:
        return SearchOptions(**_read(metadata, "search", dict))
    except TypeError as error:
        raise ValueError(
            f"search has an option that this version does not know: {error}"
        ) from error


def _words(metadata: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    words = _read(metadata, name, list | None)
    if words is None:
        return None
    if not all(isinstance(word, str) for word in words):
        raise ValueError(f"{name} has words that are no text")
    return tuple(words)


def _read(metadata: Mapping[str, str], name: str, kind: Any) -> Any:
    """A value of JSON.

    Raises:
        ValueError: it is missing, no JSON, or of another type.
    """
    try:
        value = json.loads(metadata.get(name, ""))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON: {error}") from error
    if not isinstance(value, kind):
        raise ValueError(
            f"{name} is {value!r:.80}; it must be of type {getattr(kind, '__name__', kind)}"
        )
    return value


def checksum(tensor: Tensor) -> str:
    """CRC-32 in hexadecimal digits of a contiguous tensor on the CPU."""
    return f"{zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy()):08x}"


def checksum_of_texts(texts: Mapping[str, str]) -> str:
    """The same of texts and their names."""
    return f"{zlib.crc32(json.dumps(dict(texts), sort_keys=True).encode()):08x}"
