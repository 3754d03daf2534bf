"""A model that is ready to translate text: its steps, vocabularies and limits, and how a file of
`lsq export` becomes one."""

from dataclasses import dataclass
from pathlib import Path

import torch

from lsq.config import require_choice
from lsq.run.backends import Backend, backend
from lsq.run.cuda import gpu_fault
from lsq.serving import model_file
from lsq.serving.engine import Engine
from lsq.serving.search_options import SearchOptions
from lsq.serving.steps import Steps, Symbols
from lsq.serving.subwords import Subwords, Words, processor_of

DEVICES = {"cpu": "cpu", "cuda": "cuda", "emulator": "emulated"}
"""Name of a device -> its backend."""


def backend_of(device: str) -> Backend:
    """Return the backend of a device, one of DEVICES, with activations in float32 everywhere.

    Raises:
        ValueError: there is no device of that name, or it does not work here.
    """
    require_choice("device", device, DEVICES)
    fault = gpu_fault() if device == "cuda" else None
    if fault:
        raise ValueError(f"device cuda: {fault}")
    try:
        return backend(DEVICES[device], torch.float32)
    except RuntimeError as error:
        raise ValueError(f"device {device}: {error}") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class TranslationModel:
    """A model that is ready to translate."""

    file: Path
    """The file that it was read from."""
    steps: Steps
    symbols: Symbols
    subwords: Subwords
    longest_source: int
    """Words of a sentence, its end included, at most."""
    options: SearchOptions
    """How the training itself translated, as far as that is known."""
    stamp: tuple
    """`stamp_of` the file when it was read."""

    def changed(self) -> bool:
        """Whether the file was replaced, written to or removed since it was read."""
        try:
            return stamp_of(self.file) != self.stamp
        except OSError:
            return True


def symbols_of(target: Words, padding: int) -> Symbols:
    """Return the special words of a search for words of a target vocabulary."""
    return Symbols(start=target.end, padding=padding, end=target.end, unknown=target.unknown)


def longest_source(positions: int, trained_length: int | None) -> int:
    """Return how many words a source may have: no more than in training, if that is known."""
    return min(positions, (trained_length or positions) + 1)


def stamp_of(file: Path) -> tuple:
    """Return what changes when a file is replaced or written to; OSError if it is gone."""
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_exported(path: Path, device: Backend | None = None) -> TranslationModel:
    """Read a file of `lsq export`, to compute on a backend; None: on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or a language model, or another file.
    """
    stamp = stamp_of(path)
    exported = model_file.read(path)
    architecture = exported.model.architecture
    if exported.source is None or architecture.encoder is None:
        raise ValueError(f"{path} is a language model; it does not translate")
    end = architecture.eos
    source, target = (
        Words(symbols=symbols, beginning=architecture.bos, end=end, unknown=architecture.unk)
        for symbols in (exported.source, exported.target)
    )
    steps = Engine(exported.model, device)
    # copies all weights: the file may change from now on
    steps.begin([torch.tensor([end])], rows=1, steps=1)
    steps.step(torch.tensor([end]), torch.tensor([0]), top=1)
    return TranslationModel(
        file=path,
        stamp=stamp,
        steps=steps,
        symbols=symbols_of(target, architecture.padding),
        subwords=Subwords(source, target, exported.subwords and processor_of(exported.subwords)),
        longest_source=longest_source(architecture.encoder.max_positions, exported.trained_length),
        options=exported.search,
    )
