"""`lsq convert-checkpoint`: a checkpoint of one number format as one of another."""

from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path
from typing import Any

from lsq import files
from lsq.commands import interruption
from lsq.commands.options import command_parser, is_part_of, replaces
from lsq.config import QuantConfig, documentation
from lsq.files.lock import locked_file
from lsq.layers.clip_format import FIELDS, option

CHANGEABLE = (*FIELDS, "gradient_format", "clip_init")
"""Fields of QuantConfig: what clips mean, what gradients are rounded to, which must fit the other
formats, and how clips are measured that were fixed."""
DESCRIPTION = """
Make a checkpoint that was trained in one number format into one of another, to train on with or to
translate with. Clips of weights are measured anew for it. Those of activations stay; where their
format changes, the next pass measures them. The checkpoint itself is not changed.
"""


def parser() -> ArgumentParser:
    """The command line of `lsq convert-checkpoint`."""
    parser = command_parser("convert-checkpoint", DESCRIPTION)
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a file of `lsq train` or `lsq train-text` (checkpoint_best.pt), or a folder of"
        " transformers with"
        " lsq.safetensors in it",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="PATH", help="the file or folder to write"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    texts = documentation(QuantConfig)
    for field in fields(QuantConfig):
        if field.name in CHANGEABLE:
            parser.add_argument(
                option(field.name), type=field.type, help=texts[field.name].replace("%", "%%")
            )
    return parser


def run(arguments: list[str]) -> int:
    """The subcommand: write the checkpoint.

    Raises:
        FileNotFoundError, ValueError: a mistake in the options or the files.
        OSError: it cannot be written.
        Interrupted: SIGTERM or SIGHUP.
    """
    options = parser().parse_args(arguments)
    changes = {
        name: getattr(options, name) for name in CHANGEABLE if getattr(options, name) is not None
    }
    if not changes:
        raise ValueError(f"say what shall be another: {', '.join(map(option, CHANGEABLE))}")
    QuantConfig(**changes)  # refuses what is not allowed before anything is read
    check_output(options.checkpoint, options.output, options.overwrite)
    with interruption.raised(), locked_file(options.output, "choose another --output"):
        convert = convert_folder if options.checkpoint.is_dir() else convert_file
        outcome = convert(options.checkpoint, options.output, changes)
    print(f"{options.output}: {outcome}")
    return 0


def check_output(checkpoint: Path, output: Path, overwrite: bool) -> None:
    """Make sure that --output may be written.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it may not, or the checkpoint is a folder around one; says what to do.
    """
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
