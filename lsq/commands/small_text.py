"""Numbers that fit a text which is too small for the defaults of `lsq train-text`."""

import math
from argparse import Namespace

from lsq.commands.options import is_given
from lsq.text.corpus import check_file

VOCABULARY, UPDATES, WARMUP, VALIDATE = (
    "--vocabulary-size",
    "--updates",
    "--warmup",
    "--validate-every",
)
CHARACTERS = 50
"""Of the text for each piece of a vocabulary, at least: rarer pieces are hardly learnt."""
MORE_THAN_LETTERS = 100
"""Pieces that a vocabulary has beside single characters."""
CHARACTERS_OF_A_TOKEN = 3
"""With a small vocabulary, roughly."""
PASSES = 200
"""Over the text in a training, at most."""
LEAST_UPDATES = 1000
"""That a model needs which begins at random."""
LARGE = 2**23
"""Bytes of a text that the defaults fit."""


def check(given: Namespace, words: list[str]) -> None:
    """Refuse defaults that are more than twice as large as what fits the text; what the user gives
    is taken.

    Args:
        given: the options of `lsq train-text`.
        words: the command line that they are from.

    Raises:
        FileNotFoundError, ValueError: a file is not there; or defaults do not fit, with numbers
            that do.
    """
    for path in (given.src, given.tgt):
        check_file(path)
    wanted = [VOCABULARY] if given.prepare_only else [VOCABULARY, UPDATES]
    missing = [option for option in wanted if not is_given(option, words)]
    if not missing or given.src.stat().st_size + given.tgt.stat().st_size > LARGE:
        return
    sides = [path.read_text(encoding="utf-8", errors="replace") for path in (given.src, given.tgt)]
    defaults = {VOCABULARY: given.vocabulary_size, UPDATES: given.updates}
    fitting = {
        VOCABULARY: _pieces(sides),
        UPDATES: _updates(sides, given.max_tokens * given.update_freq),
    }
    refused = [option for option in missing if 2 * fitting[option] < defaults[option]]
    if not refused:
        return
    advice = {option: fitting[option] for option in refused}
    if UPDATES in refused:
        tenth = {option: fitting[UPDATES] // 10 for option in (WARMUP, VALIDATE)}
        advice |= {
            option: number for option, number in tenth.items() if not is_given(option, words)
        }
    raise ValueError(
        f"the text is small ({sides[0].count(chr(10))} lines, {sum(map(len, sides))} characters on"
        " both sides) for the"
        f" default {' and '.join(f'{option} {defaults[option]}' for option in refused)}; give"
        f" {' '.join(f'{option} {number}' for option, number in advice.items())}, or numbers of"
        " your own"
    )


def _pieces(sides: list[str]) -> int:
    """Of a vocabulary: few enough for each to be seen often, and no more than there are words and
    characters."""
    letters, words = len(set().union(*sides)), len(set().union(*map(str.split, sides)))
    return _rounded(
        min(max(sum(map(len, sides)) // CHARACTERS, letters + MORE_THAN_LETTERS), letters + words)
    )


def _updates(sides: list[str], tokens: int) -> int:
    """Of a training with so many tokens in an update."""
    of_a_pass = max(1, math.ceil(max(map(len, sides)) / CHARACTERS_OF_A_TOKEN / tokens))
    return _rounded(max(LEAST_UPDATES, PASSES * of_a_pass))


def _rounded(number: int) -> int:
    """Down to two digits."""
    unit = 10 ** max(0, len(str(number)) - 2)
    return number // unit * unit
