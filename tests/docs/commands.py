"""What becomes of each command on a page: whether it is run, run small, or only checked, and why.

One table, RULES.

A check parses the command line with the program's own parser, so that an option that does not exist
is found. That the
command works is shown by another test that runs it, or its page says when somebody last did: "last
    run" and a date.
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
    " --feed-forward 32"
)
TEXT += " --heads 2 --quiet"
TRAINING = "--max-update 2 --max-tokens 400 --num-workers 0 --no-epoch-checkpoints"
for side in ("encoder", "decoder"):
    TRAINING += (
        f" --{side}-layers 1 --{side}-embed-dim 16 --{side}-ffn-embed-dim 32"
        f" --{side}-attention-heads 2"
    )

LANGUAGE_MODEL = (
    "--max-update 2 --max-tokens 400 --num-workers 0 --no-epoch-checkpoints --decoder-layers 1"
)
LANGUAGE_MODEL += " --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2"


class Parsed(BaseException):
    """The command line was taken; no program catches this."""


@contextlib.contextmanager
def until_parsed() -> Iterator[list[argparse.Namespace]]:
    """Within this context a program ends as soon as its parser has taken the command line; yields a
    list for that."""

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
    """Run a subcommand of lsq in this process, and let go of what a process would when it ends."""
    assert command(words[1]).run(words[2:]) == 0
    gc.collect()  # a training reports when its task is dropped


def parse_lsq(reader: Reader, words: list[str]) -> None:
    """Parse the command line of a subcommand of lsq; one that only makes data leaves the folder for
    them."""
    module = command(words[1])
    with until_parsed() as parsed:
        module.run(words[2:])
    if words[1] == "numbers" or getattr(parsed[0], "prepare_only", False):
        (parsed[0].output / "data").mkdir(parents=True)


def parse_lsq_train(reader: Reader, words: list[str]) -> None:
    """Parse a training's command line, which has several parsers, and check what fairseq checks."""
    convert_namespace_to_omegaconf(train.parse_training(words[2:]))


def run_fairseq_train(reader: Reader, words: list[str]) -> None:
    """Run fairseq-train in this process."""
    # of an earlier training in this process
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    args = options.parse_args_and_arch(options.get_training_parser(), words[1:])
    fairseq_train.main(convert_namespace_to_omegaconf(args))


def run_fairseq_generate(reader: Reader, words: list[str]) -> None:
    """Run fairseq-generate in this process."""
    args = options.parse_args_and_arch(options.get_generation_parser(), words[1:])
    fairseq_generate.main(convert_namespace_to_omegaconf(args))


def run_fairseq_preprocess(reader: Reader, words: list[str]) -> None:
    """Run fairseq-preprocess in this process."""
    fairseq_preprocess.main(options.get_preprocessing_parser().parse_args(words[1:]))


def run_fairseq_eval_lm(reader: Reader, words: list[str]) -> None:
    """Run fairseq-eval-lm in this process."""
    args = options.parse_args_and_arch(options.get_eval_lm_parser(), words[1:])
    fairseq_eval_lm.main(convert_namespace_to_omegaconf(args))


def parse_torchrun(reader: Reader, words: list[str]) -> None:
    """Parse torchrun's options, and check what it starts: `lsq train`, an example, or a script that
    the page saved."""
    given = torchrun.get_args_parser().parse_args(words[1:])
    command = [given.training_script, *given.training_script_args]
    if given.no_python:
        assert command[:2] == ["lsq", "train"], command
        parse_lsq_train(reader, command)
    elif command[0].startswith("examples/"):
        parse_script(reader, ["python", *command])
    else:
        assert (reader.folder / command[0]).is_file(), command


def dry_make(reader: Reader, words: list[str]) -> None:
    """Have make show what it would do."""
    command = [*words, "--dry-run", "--directory", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def parse_script(reader: Reader, words: list[str]) -> None:
    """Parse the command line of one of this repository's scripts in Python."""
    script = ROOT / words[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *words[2:]])
        patch.syspath_prepend(str(script.parent))
        with until_parsed():
            runpy.run_path(str(script), run_name="__main__")


def parse_benchmark(reader: Reader, words: list[str]) -> None:
    """Parse the command line of a benchmark that a test beside it runs, small, by calling its
    `main`."""
    name = Path(words[1]).stem
    test = ROOT / f"tests/benchmarks/test_{name}.py"
    calls = test.exists() and "main(" in test.read_text(encoding="utf-8")
    # tests/benchmarks/test_benchmarks.py runs each of those
    if not name.startswith("bench_") and not calls:
        require_date(reader, words)
    parse_script(reader, words)


def require_date(reader: Reader, words: list[str]) -> None:
    """Look for the date beside a command that no test runs.

    Raises:
        ValueError: there is none.
    """
    lines = [
        line for line in reader.block.text.splitlines() if all(word in line for word in words[:2])
    ]
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
    command = shlex.split(printed.getvalue())
    {"lsq": parse_lsq_train, "torchrun": parse_torchrun}[command[0]](reader, command)


def check_syntax(reader: Reader, words: list[str]) -> None:
    """Have bash read a script without running it."""
    subprocess.run(["bash", "-n", str(ROOT / words[0])], check=True)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How commands that begin with `words` are followed.

    Attributes:
        way: runs or checks one.
        extra: further options, which make it small.
        why: the reason, where it does not run as printed.
        test: what runs such commands, where `way` only checks them; without, pages must say when
            they last ran.
    """

    words: str
    way: Callable[[Reader, list[str]], None]
    extra: str = ""
    why: str = ""
    test: str = ""

    @property
    def runs(self) -> bool:
        """Whether `way` runs the command, be it small."""
        return self.way.__name__.startswith("run_")


RECIPES = "tests/recipes/test_recipes.py"
RAN = re.compile(r"# .*last run 20\d\d-\d\d-\d\d")
RULES = [
    Rule(
        words="lsq train-text",
        way=run_lsq,
        extra=TEXT,
        why="hours of training: the model and its updates are few",
    ),
    Rule(
        words="lsq train",
        way=run_lsq,
        extra=TRAINING,
        why="hours of training: the model and its updates are few",
    ),
    Rule(
        words="lsq train runs/lm",
        way=run_lsq,
        extra=LANGUAGE_MODEL,
        why="hours of training: the model is small",
    ),
    Rule(words="lsq generate", way=run_lsq),
    Rule(
        words="lsq numbers",
        way=parse_lsq,
        why="minutes of training",
        test="tests/commands/test_numbers.py",
    ),
    Rule(
        words="lsq compare",
        way=parse_lsq,
        why="hours of training",
        test="tests/commands/test_compare.py",
    ),
    Rule(words="lsq translate", way=run_lsq),
    Rule(
        words="lsq serve",
        way=parse_lsq,
        why="serves until it is stopped",
        test="tests/commands/test_serve.py",
    ),
    Rule(
        words="curl",
        way=leave_it,
        why="asks the service, which does not run here",
        test="tests/serve",
    ),
    Rule(words="lsq export", way=run_lsq),
    Rule(words="lsq formats", way=run_lsq),
    Rule(
        words="lsq formats --model",
        way=parse_lsq,
        why="needs a training",
        test="tests/commands/test_formats.py",
    ),
    Rule(
        words="lsq sensitivity",
        way=parse_lsq,
        why="needs a training",
        test="tests/commands/test_sensitivity.py",
    ),
    Rule(
        words="lsq convert-checkpoint",
        way=parse_lsq,
        why="needs a training",
        test="tests/commands/test_convert_checkpoint.py",
    ),
    Rule(words="lsq plan", way=run_lsq),
    Rule(
        words="lsq tune",
        way=run_lsq,
        extra="--list",
        why="minutes of measuring: the products are listed",
    ),
    Rule(words="lsq configs", way=run_lsq),
    Rule(
        words="lsq doctor",
        way=parse_lsq,
        why="half a minute of compiling",
        test="tests/commands/test_emulation.py",
    ),
    Rule(
        words="fairseq-train",
        way=run_fairseq_train,
        extra=TRAINING,
        why="hours of training, as lsq train",
    ),
    Rule(words="fairseq-preprocess", way=run_fairseq_preprocess),
    Rule(words="fairseq-eval-lm", way=run_fairseq_eval_lm),
    Rule(words="fairseq-generate", way=run_fairseq_generate),
    Rule(
        words="torchrun",
        way=parse_torchrun,
        why="many processes",
        test="tests/commands/test_workers.py",
    ),
    Rule(
        words="python benchmarks/",
        way=parse_benchmark,
        why="minutes of measuring",
        test="tests/benchmarks/test_benchmarks.py",
    ),
    Rule(
        words="python examples/",
        way=parse_script,
        why="minutes of training",
        test="tests/examples/test_examples.py",
    ),
    Rule(
        words="benchmarks/gpu_round.sh",
        way=check_syntax,
        why="needs a GPU",
        test="tests/benchmarks/test_gpu_round.py",
    ),
    Rule(words="make", way=dry_make, why="sets up a machine, and runs these tests", test=".ci/run"),
    Rule(
        words="benchmarks/gpu_carry.sh", way=check_syntax, why="downloads, and compiles for minutes"
    ),
    Rule(words="recipes/iwslt14_de_en/prepare.sh", way=dry_recipe, why="a download", test=RECIPES),
    Rule(words="recipes/wmt14_en_de/prepare.sh", way=dry_recipe, why="a download", test=RECIPES),
    *(
        Rule(
            words=f"recipes/{recipe}/run.sh",
            way=printed_recipe,
            extra="--print",
            why="days of training",
            test=RECIPES,
        )
        for recipe in ("iwslt14_de_en", "wmt14_en_de")
    ),
    Rule(
        words="recipes/numbers/run.sh",
        way=dry_recipe,
        why="minutes of training, as lsq numbers",
        test=RECIPES,
    ),
    Rule(words="recipes/text/run.sh", way=dry_recipe, why="hours of training", test=RECIPES),
    Rule(words="recipes/quality/run.sh", way=dry_recipe, why="hours of training"),
    Rule(words="recipes/sparsity/run.sh", way=dry_recipe, why="an hour of training"),
    Rule(words="recipes/formats/run.sh", way=dry_recipe, why="hours of training"),
]
"""The longest that fits counts."""
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
