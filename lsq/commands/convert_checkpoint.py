"""`lsq convert-checkpoint`: a checkpoint of one number format as one of another."""

from argparse import SUPPRESS, ArgumentParser, Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

from lsq import files
from lsq.commands import interruption
from lsq.commands.options import AnyPath, command_parser, is_part_of, replaces
from lsq.config import QuantConfig, documentation
from lsq.config.quantization import RENAMED, of_this_version
from lsq.files.lock import locked_file
from lsq.layers.clip_format import FIELDS, option

CHANGEABLE = (*FIELDS, "gradient_format", "clip_init")
"""Fields of QuantConfig: what clips mean, what gradients are rounded to, which must fit the other
formats, and how clips are measured that were fixed."""


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
    """Make the parser of `lsq convert-checkpoint`."""
    made = command_parser("convert-checkpoint", Options)
    made.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a file of `lsq train` or `lsq train-text` (checkpoint_best.pt), or a folder of"
        " transformers with lsq.safetensors in it",
    )
    texts = documentation(QuantConfig)
    for field in fields(QuantConfig):
        if field.name in CHANGEABLE:
            text = texts[field.name].replace("%", "%%")
            made.add_argument(option(field.name), type=field.type, help=text)
    for name in RENAMED:
        made.add_argument(option(name), help=SUPPRESS)
    return made


def run(arguments: list[str]) -> int:
    """Write the checkpoint.

    Raises:
        FileNotFoundError, ValueError: a mistake in the options or the files.
        OSError: it cannot be written.
        Interrupted: SIGTERM or SIGHUP.
    """
    given = parser().parse_args(arguments)
    names = (*CHANGEABLE, *RENAMED)
    changes = {name: value for name in names if (value := getattr(given, name)) is not None}
    changes = of_this_version(changes)
    if not changes:
        raise ValueError(f"say what shall be another: {', '.join(map(option, CHANGEABLE))}")
    QuantConfig(**changes)  # refuses what is not allowed before anything is read
    check_output(given.checkpoint, given.output, given.overwrite)
    with interruption.raised(), locked_file(given.output, "choose another --output"):
        convert = convert_folder if given.checkpoint.is_dir() else convert_file
        outcome = convert(given.checkpoint, given.output, changes)
    print(f"{given.output}: {outcome}")
    return 0


def check_output(checkpoint: Path, output: Path, overwrite: bool) -> None:
    """Make sure that there is a checkpoint (FileNotFoundError), not a folder around one, and that
    --output may be written (ValueError)."""
    if not checkpoint.exists():
        raise FileNotFoundError(2, "is not there", str(checkpoint))
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


def convert_file(checkpoint: Path, output: Path, changes: dict[str, Any]) -> str:
    """Convert a checkpoint of fairseq, and say what was done."""
    import torch

    from lsq.fairseq.other_format import converted

    result = converted(checkpoint, changes)
    files.write(output, lambda file: torch.save(result.state, file))
    return f"{result.measured}; {result.optimizer}"


def convert_folder(folder: Path, output: Path, changes: dict[str, Any]) -> str:
    """Convert a folder of transformers, and say what was done."""
    from lsq.models import huggingface

    return str(huggingface.convert_folder(folder, output, changes))
