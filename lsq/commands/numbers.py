"""`lsq numbers`: the built-in task, English number names to German, in float and in int8."""

import json
import os
import random
from argparse import ArgumentParser, Namespace
from pathlib import Path

from lsq.commands import launch, stages, text_run, train_text
from lsq.commands.interruption import run_lsq
from lsq.commands.losses import LOSSES, draw_losses, read_losses
from lsq.commands.options import Folder, Positive, check_writable, command_parser
from lsq.commands.prepare import Prepared, say, text_option
from lsq.commands.stages import Stage
from lsq.commands.step_memory import step_memory
from lsq.commands.text_run import BEST, hypotheses_of
from lsq.commands.train import ARCHITECTURE
from lsq.files import write_text
from lsq.files.lock import locked_folder
from lsq.text import corpus
from lsq.text.corpus import SIDES, SPLITS, TextFiles
from lsq.text.numbers import write_numbers

NUMBERS = "numbers"
SAMPLES = 8
VOCABULARY = {"size": 100, "coverage": 1.0, "max_length": 60}
SIZES = ("--layers", "--hidden", "--feed-forward", "--heads", "--max-tokens")
TRAINING = {
    "--dropout": 0.1,
    "--lr": 0.002,
    "--warmup": 40,
    "--beam": 4,
    "--bleu-tokenizer": "char",
}
"""Options of all trainings. BLEU counts characters, since German number names are single words."""
RUNS = {"float": ["--mode", "float", "--arch", ARCHITECTURE], "int8": ["--mode", "int8"]}
FAIRSEQ = {"fairseq": ["--mode", "float", "--arch", "transformer"]}
MOST_THREADS = 8
"""More threads are slower with models this small."""


class Options(train_text.Sizes):
    """Train two small translators of English number names into German, one in float32 and then one
    in int8, with the same data, options, seed and threads; compare their speed, their memory and
    their translations of numbers that neither has seen. Run the same command again to continue
    after an interruption."""

    output: Folder = Path("runs/numbers")
    """where to write"""
    updates: Positive = 550
    """updates of the weights, in each run"""
    train_pairs: Positive = 20000
    """numbers to learn from"""
    test_pairs: Positive = 500
    """numbers to test with"""
    max_tokens: Positive = 2000
    """tokens in a batch, with padding"""
    seed: int = 1
    """seed of the numbers, the weights and the dropout"""
    cpu: bool = False
    """use no GPU"""
    fairseq: bool = False
    """also train fairseq's own model, which draws other weights and masks"""
    threads: Positive = min(len(os.sched_getaffinity(0)), MOST_THREADS)
    """threads of each training"""
    quiet: bool = False
    """no progress bars"""
    layers, hidden, feed_forward, heads = 2, 128, 512, 4


def parser() -> ArgumentParser:
    made = command_parser("numbers", Options)
    launch.add_device_options(made)
    return made


def train_text_arguments(given: Namespace, files: TextFiles, name: str) -> list[str]:
    every = max(1, given.updates // 15)
    options = {
        **{
            text_option(split, SIDES[side]): files[split][side]
            for split in files
            for side in (0, 1)
        },
        "--output": given.output,
        "--name": name,
        "--vocabulary-size": VOCABULARY["size"],
        "--character-coverage": VOCABULARY["coverage"],
        "--max-length": VOCABULARY["max_length"],
        "--updates": given.updates,
        "--validate-every": every,
        "--log-every": max(1, every // 5),
        "--seed": given.seed,
        **sizes(given),
        **TRAINING,
        **(launch.device_options(given) if name in RUNS else {}),
    }
    words = [*(RUNS | FAIRSEQ)[name], *(str(word) for option in options.items() for word in option)]
    return words + ["--cpu"] * given.cpu + ["--quiet"] * given.quiet


def sizes(given: Namespace) -> dict[str, int]:
    return {option: getattr(given, option[2:].replace("-", "_")) for option in SIZES}


def report(prepared: Prepared, names: list[str]) -> None:
    """Print samples and a table of the runs; write results.json, samples.txt and losses.png."""
    source, target = prepared.lines("test", "src"), prepared.lines("test", "tgt")
    hypotheses = {name: hypotheses_of(prepared, name) for name in names}
    runs = {}
    for name in names:
        folder = prepared.output / name
        result = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        exact = sum(map(str.__eq__, hypotheses[name], target))
        runs[name] = {
            "exact_match": round(100 * exact / len(target), 2),
            "seconds_an_update": round(result["training_seconds"] / result["updates"], 4),
            **step_memory(folder / "model" / BEST),
            **result,
        }
    shown = random.Random(0).sample(range(len(source)), min(SAMPLES, len(source)))
    samples = []
    for row in sorted(shown, key=lambda row: len(source[row])):
        samples += ["", f"English     {source[row]}", f"reference   {target[row]}"]
        for name in names:
            right = "right" if hypotheses[name][row] == target[row] else "WRONG"
            samples.append(f"{name:11} {hypotheses[name][row]}  ({right})")
    write_text(prepared.output / "samples.txt", "\n".join(samples[1:]) + "\n")
    curves = {name: read_losses(prepared.output / name / "model" / LOSSES) for name in names}
    draw_losses(curves, prepared.output / "losses.png", "English number names to German")
    stages.write_json(prepared.output / "results.json", {"test_pairs": len(target), "runs": runs})
    apart = runs["int8"]["best_validation_loss"] - runs["float"]["best_validation_loss"]
    say("\n".join(samples))
    say(
        f"\n{len(target)} numbers that were not trained on, translated with the checkpoint of least"
        f" validation loss:\n{table(runs)}\nWith the same initial weights, batches and dropout"
        f" masks int8 ends {apart:+.4f} bits a token from float.\n`lsq compare` says how much of"
        " that is chance.\nMemory is of the tensors of a forward and backward pass, beside"
        " parameters, gradients and Adam's moments.\n"
        f"Everything is in {prepared.output}: losses.png, samples.txt, results.json"
    )


def table(runs: dict[str, dict]) -> str:
    first, second = runs["float"], runs["int8"]
    fastest = min(runs.keys() - {"int8"}, key=lambda name: runs[name]["seconds_an_update"])
    speed = runs[fastest]["seconds_an_update"] / second["seconds_an_update"]
    faster = f"int8 is {speed:.2f} times as fast as {fastest}"
    peak, kept = (
        f"{second[name] / first[name]:.2f} of float's" for name in ("peak_bytes", "kept_bytes")
    )
    lines = [f"{'':38}" + "".join(f"{name:>10}" for name in runs)]
    for title, key, form, factor, ratio in (
        ("exact match", "exact_match", "{:.1f} %", 1, ""),
        ("BLEU (characters)", "bleu", "{:.2f}", 1, ""),
        ("chrF", "chrf", "{:.2f}", 1, ""),
        ("least validation loss, bits a token", "best_validation_loss", "{:.4f}", 1, ""),
        ("  after so many updates", "best_update", "{:d}", 1, ""),
        ("seconds an update", "seconds_an_update", "{:.3f}", 1, faster),
        ("peak memory, MB", "peak_bytes", "{:.0f}", 1e-6, peak),
        ("  kept for the backward pass, MB", "kept_bytes", "{:.0f}", 1e-6, kept),
    ):
        figures = "".join(f"{form.format(factor * run[key]):>10}" for run in runs.values())
        lines.append(f"{title:38}{figures}   {ratio}".rstrip())
    return "\n".join(lines)


def run(arguments: list[str]) -> int:
    """Train in float and in int8, and compare; raises as `run_lsq` does."""
    given = parser().parse_args(arguments)
    check_writable(given.output, makes_folders=True)
    launch.choose_device(given, ours=True)  # for both runs, so that they compute on one device
    with locked_folder(given.output / NUMBERS, "choose another --output"):
        compare(given)
    return 0


def compare(given: Namespace) -> None:
    """Make the data, train in every mode, and report; ValueError if the options have changed."""
    text = Stage(name=NUMBERS, folder=given.output / NUMBERS, makes=corpus.FILES)
    made = ("results.json", "samples.txt", "losses.png")
    comparison = Stage(name="comparison", folder=given.output, makes=made)
    counts = {"--train-pairs": given.train_pairs, "--test-pairs": given.test_pairs}
    key = {**counts, "--seed": given.seed, **sizes(given)}
    before = comparison.check_own()
    if before is not None and (found := stages.differences(before.key, key)):
        raise ValueError(
            f"{given.output} holds a comparison with other options ({'; '.join(found)}); choose"
            " another --output"
        )

    def write(folder: Path) -> None:
        write_numbers(folder, given.train_pairs, given.test_pairs, given.seed)

    stages.run_stage(text, key, write, say)
    comparison.mark(key, finished=False)
    files = {split: tuple(text.folder / f"{split}.{side}" for side in SIDES) for split in SPLITS}
    prepared = Prepared(files=files, output=given.output, **VOCABULARY)
    names = [*RUNS, *(FAIRSEQ if given.fairseq else ())]
    for name in names:
        asked = train_text.parsed(train_text_arguments(given, files, name))
        text_run.check_folder(*asked, "choose another --output")
    for name in names:
        run_lsq(["train-text", *train_text_arguments(given, files, name)], threads=given.threads)
    report(prepared, names)
