"""`lsq allocate`: a number format for each weight of a model, under a budget."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated

import torch
from tqdm import tqdm

from lsq.commands import model_batch
from lsq.commands.options import (
    AnyPath,
    Count,
    File,
    Folder,
    check_there,
    check_writable,
    command_parser,
    replaces,
)
from lsq.commands.sensitivity import BATCH_WORDS, by_length, interruptible
from lsq.commands.sensitivity import JSON as COSTS
from lsq.files import json_file, write_text
from lsq.files.lock import locked_folder
from lsq.study import (
    Allocation,
    Allocator,
    KeptMixes,
    Refined,
    draw_front,
    read_costs,
    refine,
    weight_groups,
)
from lsq.study.allocation import METHODS, RULES

JSON, TEXT, TABLE, PICTURE = OUTPUTS = (
    "allocation.json",
    "weight_format.txt",
    "allocation.md",
    "allocation.png",
)
MIXES = "mixes.json"
FORMAT, VERSION = "lsq-allocation", 1
SIZES = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1, "": 1}


def size(text: str) -> float:
    """Convert a number of bytes, as 300000, 2.5MB or 1GB."""
    unit = next(unit for unit in SIZES if text.endswith(unit))
    return above(text.removesuffix(unit) if unit else text) * SIZES[unit]


def above(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def fewest(text: str) -> tuple[str, float]:
    """Convert PATTERN=BITS."""
    pattern, _, bits = text.rpartition("=")
    if not pattern:
        raise ArgumentTypeError(f"{text!r} is no pattern and bits, such as '*lm_head*=6'")
    return pattern, above(bits)


class Options(Namespace):
    """Choose a number format for each weight of a model of transformers', so that it loses least
    within a budget, from the costs that `lsq sensitivity` has measured. Weights that a converted
    model multiplies as one get one format."""

    costs: AnyPath
    """the folder that `lsq sensitivity` wrote, or its sensitivity.json"""
    bits: Annotated[float, above, "N"] | None = None
    """most bits of a weight's value, scales included: a mean over all weights"""
    bytes: Annotated[float, size, "N"] | None = None
    """most bytes of all weights, such as 300000 or 2.5GB"""
    at_least: Annotated[list[str], fewest, "PATTERN=BITS"] = []
    """fewest bits of weights, such as '*lm_head*=6'"""
    rule: Annotated[str, tuple(RULES)] = "divergence"
    """cost that is added up: of predictions from the float model's, the difference of losses, or
    the estimate's second term"""
    method: Annotated[str, tuple(METHODS)] = "exact"
    """exact: the best that there is; greedy: the steps that save most for what they take"""
    model: Folder | None = None
    """folder of transformers' with the model; without it, the one that was measured"""
    mixes: Count | None = None
    """measure up to so many mixes of formats near the first one with the model itself, and take the
    best; stop it whenever you like, the same command goes on"""
    text: list[File] = []
    """with --mixes: sentences as for `lsq sensitivity`"""
    words: Count = 2048
    """with --mixes: about how many words of the text"""
    quiet: bool = False
    """no progress bar"""
    output: Folder
    """folder for weight_format.txt, allocation.json, allocation.md and allocation.png"""
    overwrite: bool = False
    """replace an allocation that is there"""


def run(arguments: list[str]) -> int:
    """Write the formats; ValueError, OSError, or Interrupted after a signal."""
    given = command_parser("allocate", Options).parse_args(arguments)
    costs = read_costs(given.costs / COSTS if given.costs.is_dir() else given.costs)
    if given.bits is None and given.bytes is None:
        raise ValueError("there is no budget; give --bits or --bytes")
    if (given.mixes is None) != (not given.text):
        raise ValueError("--mixes and --text go together: mixes are measured on the text")
    check_there(*given.text)
    check_writable(given.output, makes_folders=True)
    model = given.model or Path(str(costs.about.get("model", "")))
    groups = _groups(model)
    allocator = Allocator(
        costs=costs,
        groups=groups,
        at_least=dict(given.at_least),
        rule=given.rule,
        method=given.method,
    )
    budgets = {"bits": given.bits, "bytes": given.bytes}
    found, said = allocator.run(**budgets), ""
    locked = locked_folder(given.output, "choose another --output")
    with locked, interruptible(given.overwrite):
        for name in OUTPUTS:
            replaces(given.output / name, given.overwrite)
        if given.mixes is not None:
            refined = _refined(given, allocator, model, budgets)
            found = refined.allocation
            said = (
                f"\nmeasured together: {refined.divergence:.4g}, the first mix {refined.begun:.4g},"
                f" of {refined.mixes} mixes"
            )
        _write(given, allocator, found)
    print(found.table())
    for names, reason in (
        (found.unmeasured, "were not measured, and get int8"),
        (found.unrounded, "are not rounded by lsq.convert, and stay as they are"),
    ):
        if names:
            print(f"\n{', '.join(names)} {reason}")
    limit = allocator.limit(**budgets) / found.values
    print(f"\n{_beside(found, limit, allocator.uniform())}{said}")
    print(f"\n{', '.join(OUTPUTS)} are in {given.output}")
    return 0


def _write(given: Options, allocator: Allocator, found: Allocation) -> None:
    """Write all OUTPUTS."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "weights": allocator.costs.weights,
        "rule": given.rule,
        "method": given.method,
        "bits": found.bits,
        "bytes": found.bytes,
        "cost": found.cost,
        "weight_format": found.weight_format,
        "uniform": {form: list(pair) for form, pair in allocator.uniform().items()},
    }
    lines = [{"names": one.names, "format": one.format, "cost": one.cost} for one in found.chosen]
    json_file.write(given.output / JSON, head, "chosen", lines)
    write_text(given.output / TEXT, found.weight_format + "\n")
    write_text(given.output / TABLE, f"# Formats of {given.costs}\n\n{found.table('github')}\n")
    draw_front(allocator, found, given.output / PICTURE)


def _refined(
    given: Options, allocator: Allocator, model: Path, budgets: dict[str, float | None]
) -> Refined:
    """Measure mixes with the model in a folder."""
    batch, path = model_batch.of_transformers(model, given.text, given.words), given.output / MIXES
    if given.overwrite:
        path.unlink(missing_ok=True)
    with tqdm(
        desc="measuring", unit=" mixes", total=given.mixes, disable=given.quiet or None
    ) as bar:

        def progress(done: int, least: float) -> None:
            bar.set_postfix_str(f"{least:.4g}", refresh=False)
            bar.update(done - bar.n)

        return refine(
            allocator,
            batch.model,
            lambda model, numbers: batch.losses(numbers),
            by_length(batch.lengths, BATCH_WORDS),
            **budgets,
            mixes=given.mixes,
            keep=KeptMixes(path=path, about={"text": batch.description}, progress=progress),
        )


def _beside(found: Allocation, bits: float, uniform: dict[str, tuple[float, float]]) -> str:
    """Compare an allocation with the uniform format of at most so many bits that costs least."""
    fitting = {form: pair for form, pair in uniform.items() if pair[0] <= bits}
    text = f"{found.bits:.2f} bits cost {found.cost:.4g}"
    if not fitting:
        return f"{text}; no format of all weights is as small"
    form, (width, other) = min(fitting.items(), key=lambda item: item[1][1])
    return f"{text}; {form} for all weights has {width:.2f} and costs {other:.4g}"


def _groups(path: Path) -> Sequence[tuple[str, ...]]:
    """Return weight_groups of the model in a folder of transformers', on the meta device."""
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{path} is no folder of transformers', which says what weights are multiplied as one;"
            " give it as --model. For other models call lsq.study.Allocator"
        )
    import_module("lsq.models.huggingface")  # keeps a broken torchaudio out of transformers
    transformers = import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except OSError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    name = (config.architectures or ["none"])[0]
    kind = getattr(transformers, name, None)
    if kind is None:
        raise ValueError(f"{path} is of the architecture {name}, which transformers does not have")
    with torch.device("meta"):
        model = kind(config)
    return weight_groups(model)
