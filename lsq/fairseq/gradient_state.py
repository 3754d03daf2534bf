"""Files of error feedback: what each worker's rounding still owes, beside fairseq's last
checkpoint.

checkpoint_last.gradients-rank-3-of-8.safetensors holds the residuals of one worker, and as metadata
the number of updates and of workers and a checksum of it all. They belong to the checkpoint of the
same number of updates, and to as many workers.
"""

import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, distributed, nn

from lsq.dist.agreement import gather_text
from lsq.dist.feedback import PREFIX
from lsq.dist.topology import Topology
from lsq.fairseq.compatibility.saving import write_whole

NAME = "checkpoint_last.gradients-rank-{}-of-{}.safetensors"
OF_ANY = re.compile(re.escape(NAME).replace(r"\{\}", r"(\d+)"))


def path(folder: Path, topology: Topology) -> Path:
    """The file of one worker in a folder of checkpoints."""
    return folder / NAME.format(topology.rank, topology.world_size)


def write(folder: Path, topology: Topology, updates: int, residuals: Mapping[str, Tensor]) -> None:
    """Write this worker's residuals, whole or not at all; rank 0 removes the files of other numbers
    of workers.

    Args:
        updates: that the training has made.
        residuals: PREFIX and a parameter's name -> float32 of its number of values.

    Raises:
        CheckpointNotWritten: the file system refused, e.g. because it is full.
    """
    metadata = {"updates": str(updates), "workers": str(topology.world_size)}
    content = {name: residual.cpu().contiguous() for name, residual in residuals.items()}
    content = save(content, {**metadata, "checksum": checksum(content, metadata)})
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(str(path(folder, topology)), lambda file: file.write(content))
    if topology.rank == 0:
        for file in folder.iterdir():
            found = OF_ANY.fullmatch(file.name)
            if found and int(found[2]) != topology.world_size:
                file.unlink(missing_ok=True)


def checksum(residuals: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """CRC-32 (hexadecimal digits) of residuals on the CPU, their names and their metadata;
    safetensors has none."""
    value = zlib.crc32(repr(sorted(metadata.items())).encode())
    for name, residual in sorted(residuals.items()):
        value = zlib.crc32(
            residual.numpy().tobytes(), zlib.crc32(f"{name} {residual.dtype}".encode(), value)
        )
    return f"{value:08x}"


def read(
    folder: Path, topology: Topology, updates: int, model: nn.Module, device: torch.device
) -> tuple[dict[str, Tensor], str | None]:
    """The residuals that belong to a checkpoint: of all workers or of none.

    Every worker must call it.

    Args:
        folder: of the checkpoint.
        updates: that it was written after.
        model: whose parameters the residuals are of.
        device: that the default process group can carry.

    Returns:
        (residuals as given to `write`, None), or ({}, why none belong to it, of the first such
        worker).

    Raises:
        ValueError: on every worker: the file of one of them is damaged or cannot be read.
    """
    fault, residuals, reason = "", {}, None
    try:
        residuals, reason = _read_own(folder, topology, updates, model)
    except (OSError, SafetensorError, ValueError) as error:
        fault = f"{path(folder, topology)} is damaged or cannot be read ({str(error)[:200]})"
    for text in gather_text(fault, distributed.group.WORLD, device):
        if text:
            raise ValueError(f"{text}; to start error feedback from zero, remove this file")
    reasons = [text for text in gather_text(reason or "", distributed.group.WORLD, device) if text]
    return ({}, reasons[0]) if reasons else (residuals, None)


def _read_own(
    folder: Path, topology: Topology, updates: int, model: nn.Module
) -> tuple[dict[str, Tensor], str | None]:
    """`read`, for this worker alone.

    Raises:
        OSError, SafetensorError: the file cannot be read.
        ValueError: its checksum does not fit.
    """
    source = path(folder, topology)
    try:
        os.lstat(source)
    except FileNotFoundError:
        found = (OF_ANY.fullmatch(file.name) for file in folder.glob("*"))
        others = sorted({int(match[2]) for match in found if match})
        kept = (
            f"; those here are of {others[0]} workers, and now there are {topology.world_size}"
            if others
            else ""
        )
        return {}, f"there is no file {source}{kept}"
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata() or {}
        residuals = {name: file.get_tensor(name) for name in file.keys()}
    if metadata.pop("checksum", None) != checksum(residuals, metadata):
        raise ValueError("its checksum does not fit")
    if metadata.get("updates") != str(updates):
        return (
            {},
            f"{source} is of update {metadata.get('updates')}, and the checkpoint of update"
            f" {updates}",
        )
    sizes = {PREFIX + name: parameter.numel() for name, parameter in model.named_parameters()}
    strange = [name for name, residual in residuals.items() if sizes.get(name) != residual.numel()]
    if strange:
        return {}, f"{source} is of another model: {strange[0]} does not fit"
    return residuals, None
