"""`lsq convert-checkpoint`: convert a checkpoint to another number format."""

from argparse import SUPPRESS, ArgumentParser
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
from lsq.commands.user_code import UserCode
from lsq.config import QuantConfig
from lsq.config.quantization import RENAMED, of_this_version
from lsq.files.lock import locked_file
from lsq.layers.clip_format import FIELDS, option

CHANGEABLE = (*FIELDS, "gradient_format", "clip_init")
"""Fields of QuantConfig that can be changed."""


class Options(UserCode):
    """Convert a trained checkpoint to another number format, to train on with it or to translate
    with it. Clips of weights are measured anew. Clips of activations stay; where their format
    changes, the next pass measures them. The given checkpoint is not changed."""

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
    for name in RENAMED:
        made.add_argument(option(name), help=SUPPRESS)
    return made


def run(arguments: list[str]) -> int:
    """Write the converted checkpoint; ValueError, OSError, or Interrupted by SIGTERM or SIGHUP."""
    given = parser().parse_args(arguments)
    names = (*CHANGEABLE, *RENAMED)
    changes = {name: value for name in names if (value := getattr(given, name)) is not None}
    changes = of_this_version(changes)
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
    """Refuse a missing checkpoint, the folder of a training, and an unsuitable --output."""
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
