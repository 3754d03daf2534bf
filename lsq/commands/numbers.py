"""`lsq numbers`: the built-in task. English number names to German, learnt in float and in int8 side by side.

No number that is tested is trained on.
"""

import argparse
import os
import random
from argparse import ArgumentParser, Namespace
from pathlib import Path

from lsq.commands import stages
from lsq.commands.losses import LOSSES, draw_losses, read_losses
from lsq.commands.options import one_line_errors, positive
from lsq.commands.prepare import Prepared, prepare, say, text_option
from lsq.commands.run_folder import check_data
from lsq.commands.side_by_side import OUTPUT, Training, train_side_by_side
from lsq.commands.stages import Stage
from lsq.commands.text_run import hypotheses_of
from lsq.config import MODES
from lsq.files import write_text
from lsq.lock import locked_folder
from lsq.text import corpus
from lsq.text.corpus import SIDES, SPLITS, TextFiles
from lsq.text.numbers import write_numbers
from lsq.text.vocabulary import VocabularyOptions

NUMBERS = "numbers"
"""The folder of the text in the output folder."""
SAMPLES = 8
"""Translations that are shown."""
VOCABULARY = VocabularyOptions(size=200, coverage=1.0, max_length=60)
MODEL = {
    "--layers": "2",
    "--hidden": "128",
    "--feed-forward": "512",
    "--heads": "4",
    "--dropout": "0.1",
    "--lr": "0.002",
    "--warmup": "100",
    "--max-tokens": "2500",
    "--beam": "4",
    "--bleu-tokenizer": "char",
}
"""Options of `lsq train-text`, the same for both runs. BLEU counts characters: German names are single words."""


def parser() -> ArgumentParser:
    """The command line of `lsq numbers`."""
    made = ArgumentParser(
        prog="lsq numbers",
        description=(
            "Train two small translators of English number names into German, one in float and one in int8, with the"
            " same data, options and seed, in two processes at the same time; compare them on numbers that neither has"
            " seen. Run the same command again to continue after an interruption."
        ),
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    one_line_errors(made)
    made.add_argument("--output", type=Path, default=Path("runs/numbers"), metavar="DIR", help="where to write")
    made.add_argument("--updates", type=positive, default=600, help="updates of the weights, in each run")
    made.add_argument("--train-pairs", type=positive, default=20000, help="numbers to learn from")
    made.add_argument("--test-pairs", type=positive, default=500, help="numbers to test with")
    made.add_argument("--seed", type=int, default=1, help="seed of the numbers, the weights and the dropout")
    made.add_argument("--quiet", action="store_true", help="no progress bars")
    return made


def train_text_arguments(given: Namespace, files: TextFiles, mode: str) -> list[str]:
    """The command line of `lsq train-text` for one of the two runs."""
    arguments = []
    for split, pair in files.splits().items():
        for side, path in zip(SIDES, pair, strict=True):
            arguments += [text_option(split, side), str(path)]
    every = max(1, given.updates // 20)
    options = {
        "--output": str(given.output),
        "--mode": mode,
        "--vocabulary-size": str(VOCABULARY.size),
        "--character-coverage": str(VOCABULARY.coverage),
        "--max-length": str(VOCABULARY.max_length),
        "--updates": str(given.updates),
        "--validate-every": str(every),
        "--log-every": str(max(1, every // 4)),
        "--seed": str(given.seed),
        **MODEL,
    }
    return arguments + [word for option in options.items() for word in option] + ["--cpu", "--quiet"]


def report(prepared: Prepared, results: dict[str, dict]) -> dict:
    """Compare the runs: prints a table and samples, writes results.json, samples.txt and losses.png.

    Returns:
        The content of results.json.
    """
    source, target = prepared.lines("test", "src"), prepared.lines("test", "tgt")
    hypotheses = {name: hypotheses_of(prepared, name) for name in results}
    runs = {}
    for name, result in results.items():
        exact = sum(map(str.__eq__, hypotheses[name], target))
        runs[name] = {"exact_match": round(100 * exact / len(target), 2), **result}
    shown = random.Random(0).sample(range(len(source)), min(SAMPLES, len(source)))
    samples = []
    for row in sorted(shown, key=lambda row: len(source[row])):
        samples += ["", f"English     {source[row]}", f"reference   {target[row]}"]
        for name in results:
            right = "right" if hypotheses[name][row] == target[row] else "WRONG"
            samples.append(f"{name:11} {hypotheses[name][row]}  ({right})")
    write_text(prepared.output / "samples.txt", "\n".join(samples[1:]) + "\n")
    curves = {name: read_losses(prepared.output / name / "model" / LOSSES) for name in results}
    draw_losses(curves, prepared.output / "losses.png", "English number names to German")
    content = {"test_pairs": len(target), "runs": runs}
    stages.write_json(prepared.output / "results.json", content)
    say("\n".join(samples))
    say(f"\n{len(target)} numbers that were not trained on, translated with the checkpoint of least validation loss:")
    say(
        f"{'run':8}{'exact match':>13}{'BLEU (characters)':>19}{'chrF':>8}{'checkpoint':>16}{'validation loss':>17}"
        f"{'training':>10}"
    )
    for name, run in runs.items():
        say(
            f"{name:8}{run['exact_match']:12.1f}%{run['bleu']:19.2f}{run['chrf']:8.2f}"
            f"{'update ' + str(run['best_update']):>16}{run['best_validation_loss']:17.4f}"
            f"{run['training_seconds']:8.0f} s"
        )
    say(f"\nEverything is in {prepared.output}: losses.png, samples.txt, results.json")
    return content


def run(arguments: list[str]) -> int:
    """The subcommand.

    Raises:
        ValueError, OSError: a mistake in the options, or a run failed.
        Interrupted: a signal came.
    """
    given = parser().parse_args(arguments)
    with locked_folder(given.output / NUMBERS, "choose another --output"):
        compare(given)
    return 0


def compare(given: Namespace) -> dict:
    """Make the numbers and their data, train on them in every mode, and report; returns the content of results.json.

    Raises:
        ValueError: the runs that are there were made from other numbers, or the folder holds files of somebody else.
        ChildProcessError, Interrupted: see `train_side_by_side`.
    """
    text = Stage(name=NUMBERS, folder=given.output / NUMBERS, makes=corpus.FILES)
    outputs = tuple(f"{mode}-{OUTPUT}" for mode in MODES)
    comparison = Stage(
        name="comparison", folder=given.output, makes=("results.json", "samples.txt", "losses.png", *outputs)
    )
    key = {"--train-pairs": given.train_pairs, "--test-pairs": given.test_pairs, "--seed": given.seed}
    before = comparison.check_own()
    if before is not None and (found := stages.differences(before.key, key)):
        raise ValueError(
            f"{given.output} holds a comparison with other options ({'; '.join(found)}); choose another --output"
        )
    stages.run_stage(
        text, key, lambda folder: write_numbers(folder, given.train_pairs, given.test_pairs, given.seed), say
    )
    comparison.mark(key, finished=False)
    files = TextFiles(**{split: tuple(text.folder / f"{split}.{side}" for side in SIDES) for split in SPLITS})
    prepared = Prepared(files=files, output=given.output, options=VOCABULARY)
    with locked_folder(given.output, "choose another --output"):
        check_data(prepared)
        prepare(prepared)
    threads = max(1, len(os.sched_getaffinity(0)) // len(MODES))
    say(f"training in float and in int8 at the same time; threads for each: {threads}")
    results = train_side_by_side(
        [
            Training(
                name=mode,
                arguments=["train-text", *train_text_arguments(given, files, mode)],
                folder=given.output / mode,
                updates=given.updates,
            )
            for mode in MODES
        ],
        threads=threads,
        quiet=given.quiet,
    )
    return report(prepared, results)
