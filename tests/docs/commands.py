"""How the tests follow each command on a page: run it, run it small, or only check its words.

A check parses the command line with the program's own parser, which finds an option that does not
exist. Another test runs such commands, or the page says when somebody last did: "last run" and a
date.
"""

import argparse
import contextlib
import gc
import importlib
import io
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fairseq_cli.eval_lm as fairseq_eval_lm
import fairseq_cli.generate as fairseq_generate
import fairseq_cli.preprocess as fairseq_preprocess
import fairseq_cli.train as fairseq_train
import pytest
from fairseq import checkpoint_utils, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from torch.distributed import run as torchrun

from lsq.commands import train
from tests.docs.pages import ROOT
from tests.docs.reader import Reader

TEXT = (
    "--vocabulary-size 60 --max-length 40 --max-tokens 400 --updates 3 --layers 1 --hidden 16"
    " --feed-forward 32 --heads 2 --quiet"
)
SHORT = "--max-update 2 --max-tokens 400 --num-workers 0 --no-epoch-checkpoints"
ENCODER, DECODER = (
    f" --{side}-layers 1 --{side}-embed-dim 16 --{side}-ffn-embed-dim 32 --{side}-attention-heads 2"
    for side in ("encoder", "decoder")
)


class Parsed(BaseException):
    """The command line was taken; no program catches this."""


@contextlib.contextmanager
def until_parsed() -> Iterator[list[argparse.Namespace]]:
    """Within this context a program ends as soon as its parser has taken the command line; yields
    a list for that."""

    def parse_args(parser, *arguments, **named):
        parsed.append(original(parser, *arguments, **named))
        raise Parsed

    parsed: list[argparse.Namespace] = []
    original = argparse.ArgumentParser.parse_args
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        yield parsed
    assert parsed, "the program has no command line of argparse's"


def command(name: str):
    """The module of a subcommand of lsq."""
    return importlib.import_module(f"lsq.commands.{name.replace('-', '_')}")


# Ways to follow a command: way(reader, its words with those of the rule's `extra`)


def run_lsq(reader: Reader, words: list[str]) -> None:
    """Run a subcommand of lsq in this process."""
    assert command(words[1]).run(words[2:]) == 0
    gc.collect()  # a training reports when its task is dropped


def parse_lsq(reader: Reader, words: list[str]) -> None:
    """Parse a subcommand's words; one that only makes data leaves the folder for them."""
    if words[1] == "train":  # which has several parsers, and checks of fairseq's
        convert_namespace_to_omegaconf(train.parse_training(words[2:]))
        return
    with until_parsed() as parsed:
        command(words[1]).run(words[2:])
    if words[1] == "numbers" or getattr(parsed[0], "prepare_only", False):
        (parsed[0].output / "data").mkdir(parents=True)


def run_fairseq(reader: Reader, words: list[str]) -> None:
    """Run a command of fairseq in this process."""
    # of an earlier training in this process
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    if words[0] == "fairseq-train":
        args = options.parse_args_and_arch(options.get_training_parser(), words[1:])
        fairseq_train.main(convert_namespace_to_omegaconf(args))
    elif words[0] == "fairseq-preprocess":
        fairseq_preprocess.main(options.get_preprocessing_parser().parse_args(words[1:]))
    elif words[0] == "fairseq-eval-lm":
        args = options.parse_args_and_arch(options.get_eval_lm_parser(), words[1:])
        fairseq_eval_lm.main(convert_namespace_to_omegaconf(args))
    else:
        args = options.parse_args_and_arch(options.get_generation_parser(), words[1:])
        fairseq_generate.main(convert_namespace_to_omegaconf(args))


def parse_torchrun(reader: Reader, words: list[str]) -> None:
    """Parse torchrun's options, and check what it starts: `lsq train`, an example, or a script that
    the page saved."""
    given = torchrun.get_args_parser().parse_args(words[1:])
    started = [given.training_script, *given.training_script_args]
    if given.no_python:
        assert started[:2] == ["lsq", "train"], started
        parse_lsq(reader, started)
    elif started[0].startswith("examples/"):
        parse_script(reader, ["python", *started])
    else:
        assert (reader.folder / started[0]).is_file(), started


def dry_make(reader: Reader, words: list[str]) -> None:
    """Have make show what it would do."""
    dry = [*words, "--dry-run", "--directory", str(ROOT)]
    done = subprocess.run(dry, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def parse_script(reader: Reader, words: list[str]) -> None:
    """Parse the words of one of the repository's scripts in Python."""
    script = ROOT / words[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *words[2:]])
        patch.syspath_prepend(str(script.parent))
        with until_parsed():
            runpy.run_path(str(script), run_name="__main__")


def parse_benchmark(reader: Reader, words: list[str]) -> None:
    """Parse the words of a benchmark that a test runs, small; others need a date."""
    name = Path(words[1]).stem
    test = ROOT / f"tests/benchmarks/test_{name}.py"
    calls = test.exists() and "main(" in test.read_text(encoding="utf-8")
    # tests/benchmarks/test_benchmarks.py runs each bench_*.py
    if not name.startswith("bench_") and not calls:
        require_date(reader, words)
    parse_script(reader, words)


def require_date(reader: Reader, words: list[str]) -> None:
    """Look for the date beside a command that no test runs.

    Raises:
        ValueError: there is none.
    """
    text = reader.block.text.replace("\\\n", " ")  # a command may take several lines
    lines = [line for line in text.splitlines() if all(word in line for word in words[:2])]
    if not any(RAN.search(line) for line in lines):
        raise ValueError(
            f"no test runs {' '.join(words)!r}: run it, and say behind it '# last run 2026-11-26'"
        )


def dry_recipe(reader: Reader, words: list[str]) -> None:
    """Run a recipe's script with stand-ins for the programs that it calls, and parse what is ours
    of their commands."""
    ways = {
        "lsq": parse_lsq,
        "python": parse_script,
        "python3": parse_script,
        "curl": leave_a_file,
        "tar": leave_it,
    }
    reader.run(
        [str(ROOT / words[0]), *words[1:]], lambda reader, called: ways[called[0]](reader, called)
    )


def leave_a_file(reader: Reader, words: list[str]) -> None:
    """Download nothing."""
    (reader.folder / words[words.index("--output") + 1]).touch()


def leave_it(reader: Reader, words: list[str]) -> None:
    """Do nothing."""


def printed_recipe(reader: Reader, words: list[str]) -> None:
    """Have a recipe print the command that it would start, and check that."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        reader.run([str(ROOT / words[0]), *words[1:]], follow)
    print(printed.getvalue(), end="")
    started = shlex.split(printed.getvalue())
    {"lsq": parse_lsq, "torchrun": parse_torchrun}[started[0]](reader, started)


def check_syntax(reader: Reader, words: list[str]) -> None:
    """Have bash read a script without running it."""
    subprocess.run(["bash", "-n", str(ROOT / words[0])], check=True)


@dataclass(frozen=True)
class Rule:
    """How to follow commands that begin with `words`; of several rules the longest counts.

    Attributes:
        way: runs or checks one.
        why: the reason, where it does not run as printed.
        extra: further options, which make it small.
        test: what runs such commands, where `way` only checks them; without, pages must say when
            they last ran.
    """

    words: str
    way: Callable[[Reader, list[str]], None]
    why: str = ""
    extra: str = ""
    test: str = ""

    @property
    def runs(self) -> bool:
        """Whether `way` runs the command, be it small."""
        return self.way.__name__.startswith("run_")


COMMANDS, RECIPES = "tests/commands/test_", "tests/recipes/test_recipes.py"
HOURS = "hours of training"
FORKS = "a process that loads data is forked off threads of other pages, and may crash"
ALONE = "--num-workers 0"
RAN = re.compile(r"# .*last run 20\d\d-\d\d-\d\d")
RULES = [
    Rule("lsq train-text", run_lsq, HOURS, TEXT),
    Rule("lsq train", run_lsq, HOURS, SHORT + ENCODER + DECODER),
    Rule("lsq train runs/lm", run_lsq, HOURS, SHORT + DECODER),
    Rule("lsq generate", run_lsq, FORKS, ALONE),
    Rule("lsq translate", run_lsq),
    Rule("lsq export", run_lsq),
    Rule("lsq formats", run_lsq),
    Rule("lsq plan", run_lsq),
    Rule("lsq tune", run_lsq),
    Rule("lsq configs", run_lsq),
    Rule("lsq numbers", parse_lsq, "minutes of training", test=COMMANDS + "numbers.py"),
    Rule("lsq compare", parse_lsq, HOURS, test=COMMANDS + "compare.py"),
    Rule("lsq serve", parse_lsq, "serves until it is stopped", test=COMMANDS + "serve.py"),
    Rule("lsq formats --model", parse_lsq, "needs a training", test=COMMANDS + "formats.py"),
    Rule("lsq sensitivity", parse_lsq, "needs a training", test=COMMANDS + "sensitivity.py"),
    Rule("lsq allocate", parse_lsq, "needs measured costs", test=COMMANDS + "allocate.py"),
    Rule(
        "lsq convert-checkpoint",
        parse_lsq,
        "needs a training",
        test=COMMANDS + "convert_checkpoint.py",
    ),
    Rule("lsq doctor", run_lsq),
    Rule("curl", leave_it, "the service does not run here", test="tests/serving/http"),
    Rule("fairseq-train", run_fairseq, HOURS, SHORT + ENCODER + DECODER),
    Rule("fairseq-preprocess", run_fairseq),
    Rule("fairseq-eval-lm", run_fairseq, FORKS, ALONE),
    Rule("fairseq-generate", run_fairseq, FORKS, ALONE),
    Rule("torchrun", parse_torchrun, "many processes", test=COMMANDS + "workers.py"),
    Rule(
        "python benchmarks/",
        parse_benchmark,
        "minutes of measuring",
        test="tests/benchmarks/test_benchmarks.py",
    ),
    Rule(
        "python examples/",
        parse_script,
        "minutes of training",
        test="tests/examples/test_examples.py",
    ),
    Rule(
        "benchmarks/gpu_round.sh",
        check_syntax,
        "needs a GPU",
        test="tests/benchmarks/test_gpu_round.py",
    ),
    Rule("benchmarks/gpu_carry.sh", check_syntax, "downloads, and compiles for minutes"),
    Rule("make", dry_make, "sets up a machine, and runs these tests", test=".ci/run"),
    Rule("recipes/iwslt14_de_en/prepare.sh", dry_recipe, "a download", test=RECIPES),
    Rule("recipes/wmt14_en_de/prepare.sh", dry_recipe, "a download", test=RECIPES),
    Rule("recipes/iwslt14_de_en/run.sh", printed_recipe, HOURS, "--print", test=RECIPES),
    Rule("recipes/wmt14_en_de/run.sh", printed_recipe, HOURS, "--print", test=RECIPES),
    Rule("recipes/numbers/run.sh", dry_recipe, "minutes of training", test=RECIPES),
    Rule("recipes/text/run.sh", dry_recipe, HOURS, test=RECIPES),
    Rule("recipes/quality/run.sh", dry_recipe, HOURS),
    Rule("recipes/sparsity/run.sh", dry_recipe, HOURS),
    Rule("recipes/formats/run.sh", dry_recipe, HOURS),
]
PROGRAMS = {rule.words.split()[0] for rule in RULES} | {"python3", "curl", "tar"}


def rule_for(words: list[str]) -> Rule:
    """The rule for a command.

    Raises:
        ValueError: there is none.
    """
    line = " ".join(words)
    fitting = [
        rule
        for rule in RULES
        if f"{line} ".startswith(rule.words + ("" if rule.words.endswith("/") else " "))
    ]
    if not fitting:
        raise ValueError(f"tests/docs/commands.py has no rule for {line!r}")
    return max(fitting, key=lambda rule: len(rule.words))


def follow(reader: Reader, words: list[str]) -> None:
    """Run or check a command as its rule says."""
    rule = rule_for(words)
    if not (rule.runs or rule.test):
        require_date(reader, words)
    options_end = words.index("--") if "--" in words else len(words)
    rule.way(reader, [*words[:options_end], *rule.extra.split(), *words[options_end:]])
