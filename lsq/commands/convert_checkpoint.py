"""`lsq convert-checkpoint`: a checkpoint of one number format as one of another."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from lsq import files
from lsq.commands import interruption
from lsq.commands.options import (
    AnyPath,
    add_fields,
    check_there,
    command_parser,
    is_part_of,
    replaces,
)
from lsq.config import QuantConfig
from lsq.files.lock import locked_file
from lsq.layers.clip_format import FIELDS, option

CHANGEABLE = (*FIELDS, "gradient_format", "clip_init")
"""Fields of QuantConfig that may change."""


class Options(Namespace):
    """Make a checkpoint that was trained in one number format into one of another, to train on with
    or to translate with. Clips of weights are measured anew for it. Those of activations stay;
    where their format changes, the next pass measures them. The checkpoint itself is not
    changed."""

    output: AnyPath
    """the file or folder to write"""
    overwrite: bool = False
    """replace what is there"""


def parser() -> ArgumentParser:
    made = command_parser("convert-checkpoint", Options)
    made.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a file of `lsq train` or `lsq train-text` (checkpoint_best.pt), or a folder of"
        " transformers with lsq.safetensors in it",
    )
    add_fields(made, QuantConfig, CHANGEABLE)
    return made


def run(arguments: list[str]) -> int:
    """Write the checkpoint; ValueError, OSError, or Interrupted by SIGTERM or SIGHUP."""
    given = parser().parse_args(arguments)
    changes = {name: value for name in CHANGEABLE if (value := getattr(given, name)) is not None}
    if not changes:
        raise ValueError(f"say what shall be another: {', '.join(map(option, CHANGEABLE))}")
    QuantConfig(**changes)  # refuses what is not allowed before anything is read
    check_output(given.checkpoint, given.output, given.overwrite)
    with interruption.raised(), locked_file(given.output, "choose another --output"):
        if given.checkpoint.is_dir():
            from lsq.models.huggingface import convert_folder

            outcome = str(convert_folder(given.checkpoint, given.output, changes))
        else:
            import torch

            from lsq.fairseq.other_format import converted

            result = converted(given.checkpoint, changes)
            files.write(given.output, lambda file: torch.save(result.state, file))
            outcome = f"{result.measured}; {result.optimizer}"
    print(f"{given.output}: {outcome}")
    return 0


def check_output(checkpoint: Path, output: Path, overwrite: bool) -> None:
    """Refuse a missing checkpoint, a folder around one, and an --output that may not be written."""
    check_there(checkpoint)
    trained = checkpoint / "model" / "checkpoint_best.pt"
    if trained.is_file():
        raise ValueError(
            f"{checkpoint} is the folder of a training; give its checkpoint, {trained}"
        )
    if is_part_of(checkpoint, [output]) or is_part_of(output, [checkpoint]):
        raise ValueError(f"--output {output} is what is converted, or part of it; choose another")
    if replaces(output, overwrite) and output.is_dir() != checkpoint.is_dir():
        raise ValueError(
            f"--output {output} is there, and of another kind than {checkpoint}; choose another"
        )
