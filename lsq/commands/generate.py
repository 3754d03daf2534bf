"""`lsq generate`: fairseq-generate with lsq's plugin loaded and fairseq's traps removed."""

import logging
import re
from pathlib import Path

import fairseq_cli.generate as fairseq_generate
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from lsq.commands import launch
from lsq.commands.train import TASK, check_data, parse

HYPOTHESIS = re.compile(r"D-(\d+)\t[^\t]*\t(.*)")
"""A line of fairseq-generate: number of the sentence, score, text with the subwords joined."""


def run(arguments: list[str]) -> int:
    """The subcommand: translate as the options say.

    Raises:
        ValueError, OSError: a mistake in the options or the data.
    """
    args = parse(
        options.get_generation_parser(default_task=TASK),
        arguments,
        "lsq generate",
        "Translate with a trained model: the options are fairseq-generate's.",
        {},
    )
    if args.path is None:
        raise ValueError("give the checkpoint to translate with: --path")
    check_data(args)
    launch.check_precision(args)
    logging.getLogger().setLevel(logging.INFO)
    fairseq_generate.main(convert_namespace_to_omegaconf(args))
    return 0


def read_hypotheses(path: Path, count: int) -> list[str]:
    """The best translation of each sentence, in the order of the sentences, from a file of fairseq-generate's.

    Raises:
        ValueError: the file lacks a sentence.
    """
    found = {}
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            if match := HYPOTHESIS.fullmatch(line.rstrip("\n")):
                found.setdefault(int(match[1]), match[2])
    missing = [number for number in range(count) if number not in found]
    if missing:
        raise ValueError(f"{path} has no translation of {len(missing)} sentences, the first of them {missing[0]}")
    return [found[number] for number in range(count)]
