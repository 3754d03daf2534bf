"""Ranges of fairseq's options: fairseq takes any number, and fails late or trains nonsense."""

import ast
import math
from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

from fairseq.criterions import CRITERION_REGISTRY

from lsq.commands.options import LARGEST_COUNT
from lsq.fairseq.options import option


class Range(NamedTuple):
    words: str
    """Words after "it must be" in a message."""
    holds: Callable[[float], bool]
    """Test whether a number is in the range; False for NaN."""


COUNT = Range(f"from 1 to {LARGEST_COUNT}", lambda number: 1 <= number <= LARGEST_COUNT)
INTERVAL = Range("at least 1", lambda number: number >= 1)
NOT_NEGATIVE = Range("at least 0 and finite", lambda number: 0 <= number < math.inf)
LAYERS = Range("from 0 to 1000", lambda number: 0 <= number <= 1000)
SCALE = Range("from -1e6 to 1e6", lambda number: -1e6 <= number <= 1e6)


def _or_off(allowed: Range) -> Range:
    return Range(f"{allowed.words}, or -1 for none", lambda n: n == -1 or allowed.holds(n))


COUNTS = """
    batch_size batch_size_valid beam checkpoint_shard_count distributed_world_size
    max_source_positions max_target_positions max_tokens max_tokens_valid nbest
    required_batch_size_multiple required_seq_len_multiple update_freq
"""
NOT_NEGATIVES = """
    adam_eps curriculum data_buffer_size ignore_prefix_size lr max_epoch max_len_a
    max_update max_valid_steps min_len no_repeat_ngram_size num_workers prefix_size
    save_interval_updates stop_time_hours validate_after_updates validate_interval_updates
    warmup_updates weight_decay
"""
SCALES = "diverse_beam_strength lm_weight max_len_b stop_min_lr unkpen warmup_init_lr"
NUMBERS_KEPT = "keep_best_checkpoints keep_interval_updates keep_last_epochs patience"
INTERVALS = "ema_update_freq log_interval save_interval validate_interval"
RANGES = {
    **dict.fromkeys(COUNTS.split(), COUNT),
    **dict.fromkeys(NOT_NEGATIVES.split(), NOT_NEGATIVE),
    **dict.fromkeys("decoder_layers encoder_layers".split(), LAYERS),
    **dict.fromkeys(SCALES.split(), SCALE),
    **dict.fromkeys("diverse_beam_groups sampling_topk".split(), _or_off(COUNT)),
    **dict.fromkeys(NUMBERS_KEPT.split(), _or_off(NOT_NEGATIVE)),
    **dict.fromkeys(INTERVALS.split(), INTERVAL),
    "clip_norm": Range("at least 0", lambda n: n >= 0),
    "diversity_rate": _or_off(Range("from 0 to 1e6", lambda n: 0 <= n <= 1e6)),
    "label_smoothing": Range("at least 0 and below 1", lambda n: 0 <= n < 1),
    "lenpen": Range("from -100 to 100", lambda n: -100 <= n <= 100),
    "num_batch_buckets": Range("0: fairseq's buckets fail with this NumPy", lambda n: n == 0),
    "sampling_topp": _or_off(Range("above 0 and at most 1", lambda n: 0 < n <= 1)),
    "seed": Range("from 0 to 4294967295", lambda n: 0 <= n < 2**32),
    "temperature": Range("from 1e-3 to 1e6", lambda n: 1e-3 <= n <= 1e6),
}
"""Name in fairseq's namespaces -> range of its value, or of each value of a list."""

TRANSLATION_TASKS = {"translation", "lsq_translation"}
WORD_BY_WORD = TRANSLATION_TASKS | {"language_modeling", "lsq_language_modeling"}
"""Tasks whose models predict each word from the words before it."""
CRITERIA = {
    "adaptive_loss",
    "composite_loss",
    "cross_entropy",
    "label_smoothed_cross_entropy",
    "label_smoothed_cross_entropy_with_alignment",
}
"""fairseq's own criterions that models of WORD_BY_WORD can be trained with."""


def check(args: Namespace) -> None:
    """Raise a ValueError if a number is out of its range."""
    given = vars(args)
    for name in sorted(RANGES.keys() & given.keys()):
        values = given[name] if isinstance(given[name], list) else [given[name]]
        if not values:
            raise ValueError(f"{option(name)} has no value; give at least one")
        for value in values:
            if isinstance(value, (int, float)) and not RANGES[name].holds(value):
                raise ValueError(f"{option(name)} is {value}; it must be {RANGES[name].words}")


def check_training(args: Namespace) -> None:
    """Raise a ValueError for options of a training that are wrong or contradict each other."""
    if args.lr_scheduler == "inverse_sqrt" and args.warmup_updates == 0:
        raise ValueError("--warmup-updates is 0; --lr-scheduler inverse_sqrt needs at least 1")
    if args.lr_scheduler == "polynomial_decay" and args.total_num_update is None:
        raise ValueError(
            "--lr-scheduler polynomial_decay needs --total-num-update, the updates until its end"
        )
    of_fairseq = CRITERION_REGISTRY[args.criterion].__module__.startswith("fairseq.")
    if args.task in WORD_BY_WORD and of_fairseq and args.criterion not in CRITERIA:
        usable = ", ".join(sorted(CRITERIA))
        raise ValueError(
            f"--criterion {args.criterion} is not for --task {args.task}; use one of {usable}"
        )
    betas = getattr(args, "adam_betas", None)
    if betas is not None and not _are_betas(_literal(betas)):
        raise ValueError(
            f"--adam-betas is {betas!r}; it must be two numbers from 0 to below 1, such as '(0.9,"
            " 0.98)'"
        )


def _literal(text: object) -> object:
    try:
        return ast.literal_eval(text) if isinstance(text, str) else text
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _are_betas(values: object) -> bool:
    try:
        return len(values) == 2 and all(0 <= value < 1 for value in values)
    except TypeError:  # no list, or a list of other things than numbers
        return False


def check_generation(args: Namespace) -> None:
    """Raise a ValueError if options of a translation contradict each other."""
    if args.sampling and args.nbest != args.beam:
        raise ValueError(
            f"--sampling draws --beam ({args.beam}) translations of each sentence and keeps them"
            f" all: give --nbest {args.beam}, or --beam {args.nbest}"
        )
    if args.nbest > args.beam:
        raise ValueError(
            f"--nbest is {args.nbest}, but --beam {args.beam} finds no more; give --beam"
            f" {args.nbest}"
        )
    if args.diverse_beam_groups > 0 and args.beam % args.diverse_beam_groups:
        raise ValueError(f"--beam is {args.beam}; it must be a multiple of --diverse-beam-groups")
    if args.max_len_a == 0 and args.max_len_b < max(1, args.min_len):
        raise ValueError(
            f"--max-len-b is {args.max_len_b}; it must be at least 1, and at least --min-len"
        )
    if args.constraints is not None:
        raise ValueError(
            "--constraints needs constraints beside each sentence, which binarised data does not"
            " have; leave it out, or use fairseq-interactive"
        )
    overrides = _literal(args.model_overrides)
    if not isinstance(overrides, dict) or not all(isinstance(name, str) for name in overrides):
        raise ValueError(
            f"--model-overrides is {args.model_overrides!r}; it must be names and values:"
            " \"{'data': 'folder'}\""
        )
    if args.task in WORD_BY_WORD:
        for name in ("retain_iter_history", "print_step"):
            if getattr(args, name):
                raise ValueError(
                    f"{option(name)} is for models that refine translations step by step; leave it"
                    " out"
                )
