"""`lsq compare`: measure by paired trainings how much int8 loses with your data and options.

Trainings of one seed share initial weights, batches and dropout masks. Two float trainings, with
learning rates that differ in the last bit, show how large a difference chance makes.
"""

import json
import math
import re
import shlex
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

from lsq.commands import stages, text_run, train_text
from lsq.commands.interruption import run_lsq
from lsq.commands.losses import LOSSES, read_losses
from lsq.commands.options import Positive, command_parser, is_given
from lsq.commands.prepare import say
from lsq.commands.stages import Stage
from lsq.commands.train import ARCHITECTURE
from lsq.files.lock import locked_folder
from lsq.study.tables import fitted

FLOAT, AGAIN = "float", "float-again"
LAST_BIT = 1 + 2**-23
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Number of seeds -> standard errors that chance exceeds once in 20 cases (Student's t)."""
SET_HERE = "--mode", "--seed", "--name", "--prepare-only"
NOT_AFTER = "--lr", "--arch", "-a", "--lsq-mode", "--max-update", *SET_HERE
"""Options that would override the differences between the trainings."""
FILES = "differences.json", "differences.png"
REMEDY = "choose another --output, or delete the trainings that are there with --overwrite"
WINDOWS = 10
SIDE = re.compile("[a-z][a-z0-9_.-]*")


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise ArgumentTypeError(f"{text!r} is no seed; it must be a number from 0 to 4294967295")
    return int(text)


class Options(Namespace):
    """Train the same model in float32 and in int8 from the same initial weights, on the same
    batches and dropout masks. Print the differences of their losses, beside the differences of two
    float32 trainings. The options of `lsq train-text` say what is trained, all but --mode, --seed
    and --name. Run the same command again to continue after an interruption, or with old and new
    seeds together: only the new ones are trained."""

    seeds: Annotated[list[int], seed] = [1]
    """seeds; each side is trained once with each seed"""
    side: Annotated[list[str], "NAME=OPTIONS"] = []
    """in place of int8: options of `lsq train-text` by which a training differs from float, e.g.
    learned='--mode int8 --lsq-clips learned'; may be given several times"""
    threads: Positive = 1
    """threads of each training"""


def sides_of(given: list[str], shared: Namespace) -> dict[str, list[str]]:
    """Return side -> its options: float, float again, the user's; ValueError for a wrong --side."""
    in_float = ["--mode", "float", "--arch", shared.arch or ARCHITECTURE]
    sides = {FLOAT: in_float, AGAIN: [*in_float, "--lr", repr(shared.lr * LAST_BIT)]}
    for text in given or ["int8=--mode int8"]:
        name, equals, options = text.partition("=")
        if not equals or not SIDE.fullmatch(name) or name in sides:
            raise ValueError(
                f"--side {text!r} must be NAME=OPTIONS, with a new name of small letters, digits, _"
                " . and - each time"
            )
        try:
            sides[name] = words = shlex.split(options)
        except ValueError as error:
            raise ValueError(f"--side {name}: {error}") from error
        for option in (*SET_HERE[1:], "--output", "--updates", "--help", "-h"):
            if is_given(option, words):
                raise ValueError(
                    f"--side {name}: {option} is no difference between sides; leave it out"
                )
    return sides


def run(arguments: list[str]) -> int:
    """Run the trainings that are missing, and report; raises as `run_lsq` does."""
    middle = arguments.index("--") if "--" in arguments else len(arguments)
    epilog = "`lsq train-text --help` lists the options of a training."
    parser = command_parser("compare", Options, epilog=epilog)
    given, common = parser.parse_known_args(arguments[:middle])
    extra = arguments[middle:]
    for option in SET_HERE:
        if is_given(option, common):
            raise ValueError(
                f"{option} is set by lsq compare itself; leave it out, or see --seeds and --side"
            )
    for option in NOT_AFTER:
        if is_given(option, extra):
            raise ValueError(
                f"{option} after -- would be the same for all trainings; give it before --, if at"
                " all"
            )
    of_training = train_text.parser()
    of_training.prog = "lsq compare"
    shared = of_training.parse_args(common)
    if not is_given("--log-every", common):
        common += ["--log-every", str(max(1, shared.updates // WINDOWS))]
    sides = sides_of(given.side, shared)
    runs, seeds = [], list(dict.fromkeys(given.seeds))
    for seed in seeds:
        for name, options in sides.items():
            named = ["--seed", str(seed), "--name", f"{name}-{seed}"]
            runs.append([*common, *options, *named, *extra])
            # refuses mistakes before anything is trained
            text_run.check_folder(*train_text.parsed(runs[-1]), REMEDY)
    made = Stage(name="comparison", folder=shared.output / "comparison", makes=FILES)
    made.check_own()
    with locked_folder(made.folder, "choose another --output"):
        for words in runs:
            run_lsq(["train-text", *words], threads=given.threads)
        made.mark({}, finished=False)
        report(shared.output, list(sides), seeds, made.folder)
    return 0


def report(output: Path, names: list[str], seeds: list[int], folder: Path) -> None:
    """Print the differences between the finished runs, and write FILES."""
    curves, results = {}, {}
    for run in ((name, seed) for name in names for seed in seeds):
        path = output / "{}-{}".format(*run)
        curves[run] = read_losses(path / "model" / LOSSES)
        results[run] = json.loads((path / "results.json").read_text(encoding="utf-8"))
    others = names[1:]
    # a training that began with another --log-every may lack a window
    windows = sorted(set.intersection(*(set(curve.training) for curve in curves.values())))
    validated = max(set.intersection(*(set(curve.validation) for curve in curves.values())))
    rows: list[tuple[str, int, Callable[[tuple[str, int]], float]]] = [
        (f"updates {before + 1} to {end}", 4, lambda run, end=end: curves[run].training[end])
        for before, end in zip([0, *windows], windows, strict=False)
    ]
    rows += [
        (f"validation after {validated}", 4, lambda run: curves[run].validation[validated]),
        ("BLEU", 2, lambda run: results[run]["bleu"]),
        ("chrF", 2, lambda run: results[run]["chrf"]),
        ("seconds an update", 3, lambda run: seconds_an_update(results[run])),
    ]
    differences = {
        title: {
            name: [value((name, seed)) - value((FLOAT, seed)) for seed in seeds] for name in others
        }
        for title, _, value in rows
    }
    table = [
        (
            title,
            f"{mean(value((FLOAT, seed)) for seed in seeds):.{digits}f}",
            *(spread(one, digits) for one in differences[title].values()),
        )
        for title, digits, value in rows
    ]
    head = ("", FLOAT, *others)
    aligned = ("left", *("right",) * (len(head) - 1))
    say("\n" + fitted(table, head, aligned, style="github"))
    say(
        f"\nLosses are in bits a token. Of {FLOAT} the mean over seeds, of all others the"
        f" difference to it{', ± its standard error' if len(seeds) > 1 else ''}."
    )
    for name in names[2:]:
        say(verdict(name, differences[f"validation after {validated}"], differences, len(windows)))
    draw(differences, windows, others, folder / FILES[1])
    stages.write_json(folder / FILES[0], {"seeds": seeds, "differences": differences})
    say(f"The differences are in {folder}: {FILES[1]}, {FILES[0]}; the trainings are beside it")


def seconds_an_update(results: dict) -> float:
    return results["training_seconds"] / results["updates"]


def spread(values: list[float], digits: int) -> str:
    error = f" ± {stdev(values) / math.sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):+.{digits}f}{error}"


def verdict(
    name: str, ended: dict[str, list[float]], differences: dict[str, dict], windows: int
) -> str:
    """Interpret the differences in a sentence."""
    found, count = mean(ended[name]), len(ended[name])
    if count == 1:
        floor = max(
            abs(one[AGAIN][0])
            for one in [*list(differences.values())[:windows], {AGAIN: ended[AGAIN]}]
        )
        more = abs(found) > floor
        advice = "several --seeds tell whether this is chance" if more else "this may be chance"
        return (
            f"{name} ends {found:+.4f} bits a token from {FLOAT}. Float trained twice differs by up"
            f" to {floor:.4f}; {advice}."
        )
    error = stdev(ended[name]) / math.sqrt(count)
    certain = abs(found) > STUDENT[min(count, max(STUDENT))] * error
    seen = (
        ("is worse than" if found > 0 else "is better than") if certain else "cannot be told from"
    )
    return (
        f"{name} {seen} {FLOAT} by {count} seeds: {found:+.4f} bits a token at the end, with a"
        f" standard error of {error:.4f} (paired t-test, 95 %)."
    )


def draw(
    differences: dict[str, dict[str, list[float]]], windows: list[int], names: list[str], path: Path
) -> None:
    """Draw the differences of training losses: pale lines for seeds, a strong line for the mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    of_windows = list(differences.values())[: len(windows)]
    for number, name in enumerate(names):
        color = "0.5" if name == AGAIN else f"C{number - 1}"
        for seed in zip(*(one[name] for one in of_windows), strict=True):
            axes.plot(windows, seed, color=color, alpha=0.35, linewidth=1)
        means = [mean(one[name]) for one in of_windows]
        axes.plot(windows, means, color=color, label=name, marker="o", markersize=3)
    axes.axhline(0, color="black", linewidth=0.8)
    title = "Training losses, paired by seed"
    axes.set(xlabel="updates", ylabel=f"bits a token above {FLOAT}", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
