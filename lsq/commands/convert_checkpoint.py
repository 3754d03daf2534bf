"""`lsq convert-checkpoint`: a checkpoint of one number format as one of another."""

from argparse import ArgumentParser, Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

from lsq import files
from lsq.commands import interruption
from lsq.commands.options import HelpFormatter, is_part_of, one_line_errors, replaces
from lsq.config import QuantConfig, documentation
from lsq.files.lock import locked_file
from lsq.layers.clip_format import FIELDS, option

CHANGEABLE = (*FIELDS, "gradient_format", "clip_init")
"""Fields of QuantConfig.

Some say nothing about what clips mean: what gradients are rounded to, which must go with the other
    formats, and how clips are measured, which they are not where they were fixed.
"""
DESCRIPTION = """
Make a checkpoint that was trained in one number format into one of another, to train on with or to
translate with. Clips of weights are measured anew for it. Those of activations stay; where their
format changes, the next pass measures them. The checkpoint itself is not changed.
"""


def parser() -> ArgumentParser:
    """The command line of `lsq convert-checkpoint`."""
    made = ArgumentParser(
        prog="lsq convert-checkpoint",
        description=DESCRIPTION,
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    one_line_errors(made)
    made.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a file of `lsq train` or `lsq train-text` (checkpoint_best.pt), or a folder of"
        " transformers with"
        " lsq.safetensors in it",
    )
    made.add_argument(
        "--output", type=Path, required=True, metavar="PATH", help="the file or folder to write"
    )
    made.add_argument("--overwrite", action="store_true", help="replace what is there")
    texts = documentation(QuantConfig)
    for field in fields(QuantConfig):
        if field.name in CHANGEABLE:
            made.add_argument(
                option(field.name), type=field.type, help=texts[field.name].replace("%", "%%")
            )
    return made


def run(arguments: list[str]) -> int:
    """The subcommand: write the checkpoint.

    Raises:
        FileNotFoundError, ValueError: a mistake in the options or the files.
        OSError: it cannot be written.
        Interrupted: SIGTERM or SIGHUP.
    """
    given = parser().parse_args(arguments)
    changes = {
        name: getattr(given, name) for name in CHANGEABLE if getattr(given, name) is not None
    }
    if not changes:
        raise ValueError(f"say what shall be another: {', '.join(map(option, CHANGEABLE))}")
    QuantConfig(**changes)  # refuses what is not allowed before anything is read
    check_output(given)
    with interruption.raised(), locked_file(given.output, "choose another --output"):
        said = (
            convert_folder(given, changes)
            if given.checkpoint.is_dir()
            else convert_file(given, changes)
        )
    print(f"{given.output}: {said}")
    return 0


def check_output(given: Namespace) -> None:
    """Make sure that --output may be written.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it may not, or what is converted is a folder around a checkpoint; with what to
            do.
    """
    output = given.output
    if not given.checkpoint.exists():
        raise FileNotFoundError(2, "is not there", str(given.checkpoint))
    trained = given.checkpoint / "model" / "checkpoint_best.pt"
    if trained.is_file():
        raise ValueError(
            f"{given.checkpoint} is the folder of a training; give its checkpoint, {trained}"
        )
    if is_part_of(given.checkpoint, [output]) or is_part_of(output, [given.checkpoint]):
        raise ValueError(f"--output {output} is what is converted, or part of it; choose another")
    if replaces(output, given.overwrite) and output.is_dir() != given.checkpoint.is_dir():
        raise ValueError(
            f"--output {output} is there, and of another kind than {given.checkpoint}; choose"
            " another"
        )


def convert_file(given: Namespace, changes: dict[str, Any]) -> str:
    """Convert a checkpoint of fairseq.

    Returns:
        What was done, to be shown.
    """
    import torch

    from lsq.fairseq.other_format import converted

    found = converted(given.checkpoint, changes)
    files.write(given.output, lambda file: torch.save(found.state, file))
    return f"{told(found.weights, found.activations_due)}; {found.optimizer}"


def convert_folder(given: Namespace, changes: dict[str, Any]) -> str:
    """Convert a folder of transformers.

    Returns:
        What was done, to be shown.
    """
    from lsq.models.huggingface.other_format import convert_folder

    return told(*convert_folder(given.checkpoint, given.output, changes))


def told(weights: int, activations_due: bool) -> str:
    """What became of clips."""
    due = "are measured in the next pass, a training's: nothing is translated before"
    activations = due if activations_due else "are kept"
    measured = (
        f"clips of {weights} weights are measured anew"
        if weights
        else "no weight has a clip in this format"
    )
    return f"{measured}, those of activations {activations}"
