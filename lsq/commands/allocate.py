"""`lsq allocate`: a number format for each tensor of a model, under budgets."""

from argparse import ArgumentTypeError
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Annotated

import torch
from torch import nn
from tqdm import tqdm

from lsq.commands import model_batch, run_files
from lsq.commands.model_batch import TextOptions
from lsq.commands.options import (
    AnyPath,
    Count,
    Folder,
    above,
    check_there,
    check_writable,
    command_parser,
    replaces,
    size,
)
from lsq.commands.sensitivity import BATCH_WORDS, by_length, interruptible
from lsq.commands.sensitivity import JSON as COSTS
from lsq.files import json_file, write_text
from lsq.files.lock import locked_folder
from lsq.layers.clips import ClippedModule
from lsq.study import (
    Allocation,
    Allocator,
    Budget,
    Costs,
    Found,
    Groups,
    KeptMixes,
    Search,
    draw_front,
    groups_of,
    read_costs,
    search,
    timed,
)
from lsq.study.allocate import MIXES
from lsq.study.allocation import METHODS, RULES
from lsq.study.resources import SAID
from lsq.study.search import SEARCHES
from lsq.study.tensors import WEIGHT

JSON, TABLE, PICTURE, *TEXTS = OUTPUTS = (
    "allocation.json",
    "allocation.md",
    "allocation.png",
    "weight_format.txt",
    "activation_format.txt",
)
FORMAT, VERSION = "lsq-allocation", 2
EXACT, REFINE = "exact", "refine"
PROJECTION = "decoder.output_projection.weight"
HELD_OUT = 4
"""Every fourth sentence is held out from a search, to compare its result with uniform formats."""
BUDGETS = tuple(field.name for field in fields(Budget))


def fewest(text: str) -> tuple[str, float]:
    """Convert PATTERN=BITS."""
    pattern, _, bits = text.rpartition("=")
    if not pattern:
        raise ArgumentTypeError(f"{text!r} is no pattern and bits, such as '*lm_head*=6'")
    return pattern, above(bits)


class Options(TextOptions):
    """Choose a number format for each weight of a model, so that it loses least within budgets,
    from the costs that `lsq sensitivity` has measured. Weights that a converted model multiplies as
    one get one format. Searches measure mixes of formats with the model itself; stop them whenever
    you like, the same command goes on."""

    costs: AnyPath
    """the folder that `lsq sensitivity` wrote, or its sensitivity.json"""
    bits: Annotated[float, above, "N"] | None = None
    """most bits of a weight's value, scales included: a mean over all weights"""
    bytes: Annotated[float, size, "N"] | None = None
    """most bytes of all weights, such as 300000 or 2.5GB"""
    operations: Annotated[float, above, "N"] | None = None
    """most bit operations of a word: the sum of rows x outputs x inputs x bits of weight x bits of
    activation over all products"""
    milliseconds: Annotated[float, above, "N"] | None = None
    """most milliseconds of all products of a step of decoding; measured on this machine once"""
    joules: Annotated[float, above, "N"] | None = None
    """most joules of a step, modelled from published energies of operations and memories"""
    rows: Count = 1
    """rows of a step, for --milliseconds and --joules"""
    formats: Annotated[list[str], "FORMAT"] = []
    """formats to choose among; without it, all that were measured"""
    activations: bool = False
    """choose formats of the inputs of products, too; these run without fast products"""
    at_least: Annotated[list[str], fewest, "PATTERN=BITS"] = []
    """fewest bits of weights, such as '*lm_head*=6'"""
    rule: Annotated[str, tuple(RULES)] = "divergence"
    """cost that is added up: of predictions from the float model's, the difference of losses, or
    the estimate's second term"""
    method: Annotated[str, (*METHODS, *SEARCHES)] | None = None
    """exact: the best sum of costs that there is; greedy: the steps that save most for what they
    take. Others measure mixes: refine near the exact one, evolve the best ones' children, random
    any; ddpg and td3 are agents of stable-baselines3 (default: exact, with --text or
    --mixes refine)"""
    model: AnyPath | None = None
    """as for `lsq sensitivity`; without it, the one that was measured"""
    mixes: Count | None = None
    """most mixes to measure (default: 400); a quarter of the sentences is held out, and where a
    uniform format loses less on these, it is taken"""
    seed: int = 1
    """of searches that draw at random"""
    output: Folder
    """folder for allocation.json, table, picture, weight_format.txt and activation_format.txt"""
    overwrite: bool = False
    """replace an allocation that is there"""
    words = 2048


def run(arguments: list[str]) -> int:
    """Write the formats; ValueError, OSError, or Interrupted after a signal."""
    given = command_parser("allocate", Options).parse_args(arguments)
    costs = read_costs(given.costs / COSTS if given.costs.is_dir() else given.costs)
    budget = Budget(**{name: getattr(given, name) for name in BUDGETS})
    measures = next((name for name in ("text", "mixes") if getattr(given, name)), None)
    method = given.method or (REFINE if measures else EXACT)
    if method in METHODS and measures:
        raise ValueError(f"--method {method} measures nothing: leave --{measures} out")
    given.mixes = given.mixes or Search().mixes
    given.model = given.model or Path(str(costs.about.get("model", "")))
    check_there(given.model, *given.text)
    if given.output.exists() and not given.output.is_dir():
        raise ValueError(f"--output {given.output} is a file; give a folder")
    check_writable(given.output, makes_folders=True)
    allocator = timed(
        Allocator(
            costs=costs,
            groups=_groups(given, costs),
            activations=given.activations,
            at_least=dict(given.at_least),
            formats=given.formats or None,
            rule=given.rule,
            method=method if method in METHODS else EXACT,
        ),
        budget,
    )
    allocation, said = allocator.run(budget), ""
    locked = locked_folder(given.output, "choose another --output")
    with locked, interruptible(given.overwrite):
        replaces(given.output / JSON, given.overwrite)
        if method in SEARCHES:
            found = _searched(given, allocator, budget, method)
            allocation, said = found.allocation, _said(found)
        _write(given, allocator, allocation, method)
    print(allocation.table())
    for reason, names in (
        ("not measured, get int8", allocation.unmeasured),
        ("not rounded by lsq.convert, stay as they are", allocation.unrounded),
    ):
        if names:
            print(f"\n{reason}: {', '.join(names)}")
    taken = [SAID[name](amount, allocation.values) for name, amount in allocation.takes.items()]
    print(f"\nit takes {', '.join(taken)}")
    print(f"\n{_beside(allocation, budget, allocator)}{said}")
    print(f"\n{', '.join(OUTPUTS)} are in {given.output}")
    return 0


def _write(given: Options, allocator: Allocator, found: Allocation, method: str) -> None:
    """Write all OUTPUTS; the JSON file comes last, so that a stopped command may begin again."""
    uniform = {name: [one.bits, one.cost] for name, one in allocator.uniform().items()}
    head = {
        "format": FORMAT,
        "version": VERSION,
        "weights": allocator.costs.weights,
        "rule": given.rule,
        "method": method,
        "bits": found.bits,
        "bytes": found.bytes,
        "takes": found.takes,
        "cost": found.cost,
        "weight_format": found.weight_format,
        "activation_format": found.activation_format,
        "uniform": uniform,
    }
    lines = [
        {"kind": one.part.kind, "names": one.part.names, "format": one.format, "cost": one.cost}
        for one in found.chosen
    ]
    for name in TEXTS:
        write_text(given.output / name, head[name.removesuffix(".txt")] + "\n")
    write_text(given.output / TABLE, f"# Formats of {given.costs}\n\n{found.table('github')}\n")
    draw_front(allocator, found, given.output / PICTURE)
    json_file.write(given.output / JSON, head, "chosen", lines)


def _searched(given: Options, allocator: Allocator, budget: Budget, method: str) -> Found:
    """Measure mixes with the model."""
    batch, path = model_batch.load(given), given.output / MIXES
    if given.overwrite:  # after a stop the same command without it goes on
        for old in (path, given.output / JSON):
            old.unlink(missing_ok=True)
    kept, held_out = _batches(batch.lengths)
    if not kept:
        raise ValueError("the text has one sentence, and a quarter is held out; give more --words")
    with tqdm(
        desc="measuring", unit=" mixes", total=given.mixes, disable=given.quiet or None
    ) as bar:

        def progress(done: int, least: float) -> None:
            bar.set_postfix_str(f"{least:.4g}", refresh=False)
            bar.update(done - bar.n)

        return search(
            allocator,
            budget,
            batch.model,
            lambda model, numbers: batch.losses(numbers),
            kept,
            how=Search(method=method, mixes=given.mixes, seed=given.seed),
            held_out=held_out,
            keep=KeptMixes(path=path, about={"text": batch.description}, progress=progress),
        )


def _batches(lengths: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Return batches of sentences' numbers for a search, and those that are held out."""
    held_out = set(range(0, len(lengths), HELD_OUT))
    parts = [[n for n in range(len(lengths)) if (n in held_out) == out] for out in (False, True)]
    batches = []
    for numbers in parts:
        made = by_length([lengths[number] for number in numbers], BATCH_WORDS)
        batches.append([[numbers[one] for one in each] for each in made])
    return batches[0], batches[1]


def _said(found: Found) -> str:
    """Say what a search has measured."""
    held_out = {name: f"{one:.4g}" for name, one in found.held_out.items()}
    mix = held_out.pop("mix")
    others = ", ".join(f"{name} {one}" for name, one in held_out.items()) or "nothing uniform fits"
    least = min(found.held_out, key=found.held_out.get)
    worse = least != "mix" and found.held_out[least] < found.held_out["mix"]
    return (
        f"\nmeasured together: {found.divergence:.4g}, the first mix {found.first:.4g}, of"
        f" {found.mixes} mixes\non sentences held out: {mix}; {others}"
        + (f"; {least} loses less, and is taken instead" if worse else "")
    )


def _beside(found: Allocation, budget: Budget, allocator: Allocator) -> str:
    """Compare an allocation with the uniform format within the budget that costs least."""
    fitting = {name: one for name, one in allocator.uniform().items() if one.fits(budget)}
    text = f"{found.bits:.2f} bits cost {found.cost:.4g}"
    if not fitting:
        return f"{text}; no format of all weights is as small"
    form = min(fitting, key=lambda name: fitting[name].cost)
    other = fitting[form]
    return f"{text}; {form} for all weights has {other.bits:.2f} and costs {other.cost:.4g}"


def _groups(given: Options, costs: Costs) -> Groups:
    """Return groups_of the model; ValueError if it lacks a weight whose costs were measured."""
    model = _model(given)
    shapes = {name: (*one.shape,) for name, one in model.named_parameters(remove_duplicate=False)}
    for tensor in costs.of(WEIGHT):
        if shapes.get(tensor.name) != tensor.shape:
            raise ValueError(
                f"the costs are of another model: {given.model} has no {tensor.name} of the shape"
                f" {list(tensor.shape)}"
            )
    own = any(isinstance(module, ClippedModule) for module in model.modules())
    if own or model_batch.is_of_transformers(given.model):
        return groups_of(model, given.formats or costs.formats)
    return _groups_of_fairseq(model)


def _model(given: Options) -> nn.Module:
    """Return the model; of transformers', on the meta device."""
    path = given.model
    if not model_batch.is_of_transformers(path):
        return run_files.load(run_files.find(path, given.data)).model
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
        return kind(config)


def _groups_of_fairseq(model: nn.Module) -> Groups:
    """Return what is one tensor in lsq's model that begins with the weights of fairseq's own."""
    from lsq.fairseq.checkpoint import our_name  # imports fairseq, which takes seconds

    weights = [name for name, one in model.named_parameters() if one.dim() == 2]
    names = {name: our_name(name) for name in weights if ".layers." in name}
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, ours in names.items():
        groups[ours].append(name)
    joined = tuple(map(tuple, groups.values()))
    return Groups(weights=(*joined, (PROJECTION,)), inputs=joined, names=names)
