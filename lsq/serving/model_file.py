"""lsq's own file of a decoding model: one safetensors file, checked when it is read.

It has the tensors of a DecodingModel. Codes W.codes int8 [N, K] that are 2:4 sparse are stored in
5/8 of the bytes, as the kept values and their indices: W.codes.values int8 [N, K / 2] and
W.codes.indices uint8 [N, ceil(K / 8)]; see lsq.models.sparsity.pack. Codes of fewer than 8 bits
are stored as W.codes.narrow uint8, in as many bits as they have, five ternary codes to a byte
(NumberFormat.pack); the metadata have their shapes, and the values of number formats that users
declared. The architecture has the format of each weight. The metadata have a text for each of
architecture, vocabularies and sentencepiece's model. Checksums are CRC-32: of each tensor, and of
all metadata.
"""

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

import lsq
from lsq import files
from lsq.models.sparsity import Packed, is_sparse, pack, unpack
from lsq.quant.declared import declare, declared_tables
from lsq.quant.formats import WeightFormat
from lsq.quant.tables import NumberFormat
from lsq.serving.architecture import MOST, Architecture
from lsq.serving.decoding_model import DecodingModel
from lsq.serving.search_options import SearchOptions
from lsq.serving.stored_codes import ranks_of, stored_of

KIND = "lsq model "
FORMAT, SPARSE_FORMAT, NARROW_FORMAT = FORMATS = (KIND + "1", KIND + "2", KIND + "3")
"""Formats of plain codes, of sparse and of narrow codes; an older lsq does not know the latter."""
CHECKSUM = "checksum"
"""Name of the checksum of the metadata, in the metadata."""
CODES, VALUES, INDICES, NARROW = ".codes", ".codes.values", ".codes.indices", ".codes.narrow"
SHAPES = "narrow"
"""Name of the shapes of narrow codes in the metadata."""
NUMBERS = "numbers"
"""Name of the values of numbers that users declare, in the metadata."""
FORMAT_NAME, CHECKSUMS = "format", "tensors"
GONE = ("diverse_beam_groups", "diverse_beam_strength")
"""Options of the search in older files, which are ignored, as a negative unk_penalty is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportedModel:
    """A model with its vocabularies, subwords and search options; ValueError if the vocabularies do
    not fit the model, or a value is out of its range."""

    model: DecodingModel
    source: tuple[str, ...] | None
    """Source words by number; None for a language model."""
    target: tuple[str, ...]
    subwords: bytes | None = None
    """Content of sentencepiece's model; None: texts are words with spaces between them."""
    trained_length: int | None = None
    """Words of the longest training sentence without its end, if known."""
    search: SearchOptions = SearchOptions()
    """Options of the training's own translation, as far as known."""

    def __post_init__(self) -> None:
        stacks = self.model.architecture.stacks
        for side, words in (("encoder", self.source), ("decoder", self.target)):
            wanted = stacks[side].words if side in stacks else 0
            if len(words or ()) != wanted:
                raise ValueError(
                    f"the {side} has {wanted} words, and its vocabulary {len(words or ())}"
                )
            if not all(isinstance(word, str) for word in words or ()):
                raise ValueError(f"the vocabulary of the {side} has words that are no text")
            if len(set(words or ())) != wanted:
                raise ValueError(f"a word is twice in the vocabulary of the {side}")
        if self.trained_length is not None and not 1 <= self.trained_length <= MOST:
            raise ValueError(
                f"trained_length is {self.trained_length}; it must be from 1 to {MOST}"
            )


def is_model_file(path: Path) -> bool:
    """Return whether a file begins as a file of safetensors does, and not as PyTorch's."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def is_exported(path: Path) -> bool:
    """Return whether a path is a file of `write`, of any version; its tensors are not read."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get(FORMAT_NAME, "").startswith(KIND)
    except (OSError, SafetensorError):
        return False


def write(path: Path, exported: ExportedModel) -> None:
    """Write the file, whole or not at all; ValueError if a tensor holds NaN or infinity."""
    architecture = exported.model.architecture
    tensors, shapes = narrow(exported.model.tensors, architecture.format_of)
    kind = NARROW_FORMAT if shapes else FORMAT
    split = split_sparse(tensors, architecture.format_of)
    if split.keys() != tensors.keys():
        tensors, kind = split, NARROW_FORMAT if shapes else SPARSE_FORMAT
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(
                f"{name} holds NaN or infinity; export another checkpoint of the training"
            )
    subwords = b"" if exported.subwords is None else exported.subwords
    metadata = {
        FORMAT_NAME: kind,
        SHAPES: json.dumps(shapes),
        NUMBERS: json.dumps(
            declared_tables(
                stack.config.quant.weight_format for stack in architecture.stacks.values()
            )
        ),
        "lsq": lsq.__version__,
        "architecture": architecture.to_json(),
        "source": json.dumps(exported.source),
        "target": json.dumps(exported.target),
        "subwords": base64.b64encode(subwords).decode(),
        "trained_length": json.dumps(exported.trained_length),
        "search": json.dumps(asdict(exported.search)),
        CHECKSUMS: json.dumps({name: checksum(tensor) for name, tensor in tensors.items()}),
    }
    metadata[CHECKSUM] = checksum_of_texts(metadata)
    files.write(path, lambda file: file.write(save(tensors, metadata)))


def read(path: Path) -> ExportedModel:
    """Read a model. Dense codes stay mapped to the file: it must not be modified before they have
    been copied, as the engine does. `write` makes a new file in its place.

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
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            for name, tensor in tensors.items():
                if tensor.is_floating_point():
                    tensors[name] = tensor.clone()
            return _model(metadata, tensors)
    except (SafetensorError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{path} is damaged or no model of `lsq export`: {str(error)[:300]}"
        ) from error


def _model(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> ExportedModel:
    form = metadata.get(FORMAT_NAME, "")
    if form not in FORMATS:
        raise ValueError(
            f"its format is {form[:40]!r}, not {' or '.join(map(repr, FORMATS))}; export the model"
            " again"
        )
    rest = {name: text for name, text in metadata.items() if name != CHECKSUM}
    if metadata.get(CHECKSUM) != checksum_of_texts(rest):
        raise ValueError("the checksum of its metadata does not fit")
    for name, values in _read({NUMBERS: "{}"} | rest, NUMBERS, dict).items():
        declare(name, values, "the exported file")
    architecture, codes = Architecture.from_json(rest.get("architecture", "")), tensors
    if form != FORMAT:
        codes = join_sparse(tensors)
    if form == NARROW_FORMAT:
        codes = widen(codes, _read(rest, SHAPES, dict), architecture.format_of)
    model = DecodingModel(architecture=architecture, tensors=codes)
    wanted = _read(rest, CHECKSUMS, dict)
    for name, tensor in tensors.items():
        if wanted.get(name) != checksum(tensor):
            raise ValueError(f"the checksum of {name} does not fit")
    length, source = _read(rest, "trained_length", int | None), _read(rest, "source", list | None)
    # earlier files only have the trained length
    search = {} if length is None else {"max_len_b": length}
    if "search" in rest:
        search = _read(rest, "search", dict)
    search = {name: value for name, value in search.items() if name not in GONE}
    penalty = search.get("unk_penalty")
    if isinstance(penalty, int | float) and penalty < 0:
        del search["unk_penalty"]
    try:
        options = SearchOptions(**search)
    except TypeError as error:
        raise ValueError(
            f"search has an option that this version does not know: {error}"
        ) from error
    return ExportedModel(
        model=model,
        source=None if source is None else tuple(source),
        target=tuple(_read(rest, "target", list)),
        subwords=base64.b64decode(rest.get("subwords", "")) or None,
        trained_length=length,
        search=options,
    )


def _read(metadata: Mapping[str, str], name: str, kind: Any) -> Any:
    """Read a value of JSON; ValueError if it is missing, no JSON, or of another type."""
    try:
        value = json.loads(metadata.get(name, ""))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON: {error}") from error
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.80}; it must be of type {kind}")
    return value


def split_sparse(
    tensors: Mapping[str, Tensor], format_of: Callable[[str], WeightFormat]
) -> dict[str, Tensor]:
    """Replace sparse codes by their values and indices, in formats that are not packed."""
    result = {}
    for name, tensor in tensors.items():
        weight = name.removesuffix(CODES)
        if weight != name and not format_of(weight).packed and is_sparse(tensor):
            packed = pack(tensor)
            result |= {weight + VALUES: packed.values, weight + INDICES: packed.indices}
        else:
            result[name] = tensor
    return result


def join_sparse(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `split_sparse`; ValueError if values or indices are missing, or do not fit."""
    ends = (VALUES, INDICES)
    result = {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}
    names = {name.removesuffix(end) for end in ends for name in tensors if name.endswith(end)}
    for name in sorted(names):
        values, indices = tensors.get(name + VALUES), tensors.get(name + INDICES)
        if values is None or indices is None:
            raise ValueError(f"{name} has values or indices alone")
        if not (
            values.dtype == torch.int8
            and values.dim() == 2
            and values.shape[1] % 2 == 0
            and indices.dtype == torch.uint8
            and indices.shape == (len(values), -(-values.shape[1] // 4))
        ):
            raise ValueError(
                f"{name} has values {values.dtype} {list(values.shape)} and indices"
                f" {indices.dtype} {list(indices.shape)}; they must be int8 [N, K / 2] and uint8"
                " [N, K / 8]"
            )
        result[name + CODES] = unpack(Packed(values=values, indices=indices))
    return result


def _digits(form: WeightFormat) -> tuple[NumberFormat, Tensor]:
    """Return what packs the ranks of codes, and the codes in their order."""
    _, wholes = stored_of(form)
    digits = NumberFormat(name="ranks", values=tuple(map(float, range(len(wholes)))))
    return digits, wholes


def narrow(
    tensors: Mapping[str, Tensor], format_of: Callable[[str], WeightFormat]
) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Replace codes of fewer than 8 bits by as few bytes as they need; return (tensors, shapes of
    such codes by name)."""
    result, shapes = {}, {}
    for name, tensor in tensors.items():
        weight = name.removesuffix(CODES)
        if weight != name and (form := format_of(weight)).bits < 8:
            name, (digits, _) = weight + NARROW, _digits(form)
            shapes[name], tensor = list(tensor.shape), digits.pack(ranks_of(tensor, form))
        result[name] = tensor
    return result, shapes


def widen(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Any],
    format_of: Callable[[str], WeightFormat],
) -> dict[str, Tensor]:
    """Undo `narrow`; ValueError if a shape is missing or does not fit, or a code has no value."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith(NARROW):
            shape, weight = shapes.get(name), name.removesuffix(NARROW)
            name, (digits, wholes) = weight + CODES, _digits(format_of(weight))
            if not (isinstance(shape, list) and len(shape) == 2 and tensor.dtype == torch.uint8):
                raise ValueError(
                    f"{name} is {tensor.dtype} of shape {shape!r:.80}, not uint8 [N, K]"
                )
            if not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"the shape of {name} is {shape!r:.80}")
            ranks = digits.unpack(tensor, tuple(shape))
            if ranks.numel() and int(ranks.max()) >= len(wholes):
                raise ValueError(f"{name} holds code {int(ranks.max())} of {len(wholes)}")
            tensor = wholes[ranks.int()].to(torch.int8)
        result[name] = tensor
    return result


def checksum(tensor: Tensor) -> str:
    """Return the CRC-32, in hexadecimal digits, of a contiguous tensor on the CPU."""
    return f"{zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy()):08x}"


def checksum_of_texts(texts: Mapping[str, str]) -> str:
    """Return the CRC-32 of texts and their names."""
    return f"{zlib.crc32(json.dumps(dict(texts), sort_keys=True).encode()):08x}"
