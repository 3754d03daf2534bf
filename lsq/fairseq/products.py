"""The matrix products of a training and its translations on a GPU, and which of them are tuned."""

import logging
import os
from argparse import Namespace
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path

import torch
from torch import nn

from lsq import files
from lsq.fairseq.memory import bounding_batch, build_training
from lsq.gemm import lookup
from lsq.gemm.lookup import Table, Use
from lsq.gemm.product_key import EXACT_TOKENS, TOKEN_STEP, ProductKey
from lsq.gemm.tuner import product_list
from lsq.layers.memory import rehearse_step
from lsq.program.program import Program
from lsq.run.cuda import products_of
from lsq.run.step import rehearsing

logger = logging.getLogger(__name__)


def products_of_training(
    given: Namespace,
    vocabulary: int,
    *,
    backward: Iterable[str],
    tokens: Sequence[int],
    rows: Sequence[int],
) -> list[ProductKey]:
    """List every matrix product once, except those inside attention kernels: of a training step for
    each number of tokens, then of generation. No data is read and no layer computes.

    Args:
        given, vocabulary: see `build_training`.
        backward: values of --lsq-backward whose products are listed together.
        tokens: numbers of tokens in batches, the same for source and target.
        rows: numbers of rows in a step of generation: sentences times beam.
    """
    models = []
    for mode in backward:
        options = copy(given)
        options.lsq_backward = mode
        options.lsq_clip_init = "fixed"  # nothing is measured: shapes are the same
        models.append(build_training(options, vocabulary)[1:])
    programs = [
        program
        for count in tokens
        for model, criterion in models
        for program in training_programs(model, criterion, count)
    ]
    for count in rows:
        programs += generation_programs(models[0][0], count)
    keys = (key for program in dict.fromkeys(programs) for key in products_of(program))
    return list(dict.fromkeys(keys))


def training_programs(model: nn.Module, criterion: nn.Module, tokens: int) -> list[Program]:
    """List the programs of a training step on sentences of one token each."""
    batch = bounding_batch(
        model.decoder.dictionary, max_tokens=tokens, max_sentences=None, max_positions=(1, 1)
    )
    if not hasattr(model, "encoder"):
        del batch["net_input"]["prev_output_tokens"]
    model.train()
    rehearsed, _ = rehearse_step(model, lambda: criterion(model, batch)[0])
    return rehearsed.programs


@torch.no_grad()
def generation_programs(model: nn.Module, rows: int) -> list[Program]:
    """List the programs of encoding `rows` sentences of one word, and of one step of decoding."""
    words, encoded = torch.full((rows, 1), model.decoder.dictionary.unk()), None
    model.eval()
    with rehearsing() as rehearsed:
        if hasattr(model, "encoder"):
            encoded = model.encoder(words, torch.ones(rows, dtype=torch.int64))
        model.decoder(words, encoded, incremental_state={})
    return rehearsed.programs


def token_counts(max_tokens: int, step: int) -> list[int]:
    """List `max_tokens` and the multiples of `step` below it, the largest first; ValueError unless
    the step is a multiple of 32, since products are looked up in steps of 32 tokens."""
    if step % TOKEN_STEP:
        raise ValueError(
            f"step is {step}; products are looked up in steps of {TOKEN_STEP} tokens: use a"
            " multiple"
        )
    return sorted({max_tokens, *range(step, max_tokens, step)}, reverse=True)


def generation_rows(beam: int, sentences: int) -> list[int]:
    """List the rows of steps as sentences finish, the largest first: the beam times 1, 2, 4 ..."""
    counts = {sentences, *(2**power for power in range(sentences.bit_length()))}
    exact = {beam * count for count in counts if beam * count <= EXACT_TOKENS}
    return sorted({*exact, beam * sentences}, reverse=True)


def check_report(path: str | None) -> None:
    """Raise ValueError, before a training, if `report_tuned` could not write this file."""
    if path and (os.path.isdir(path) or not os.access(Path(path).absolute().parent, os.W_OK)):
        raise ValueError(
            f"--lsq-gemm-coverage {path} cannot be written; name a file in a folder that is there"
        )


def report_tuned(path: str | None) -> None:
    """Log how many products of a GPU were tuned, and list the others for `lsq tune --shapes`."""
    table = lookup.loaded()
    if table is not None and table.uses():
        logger.info(coverage(table))
    if path:
        missed = [] if table is None else [use.key for use in _missed(table)]
        files.write_text(Path(path), product_list.text(missed))


def coverage(table: Table) -> str:
    """Describe the share of arithmetic in tuned products and the largest missed one."""
    name, uses = f"tuned products on {table.here.device}", table.uses()
    if not table.used:
        return f"{name}: none, for there is no file for this device; lsq tune makes one"
    missed = _missed(table)
    tuned = 1 - sum(use.key.arithmetic for use in missed) / sum(use.key.arithmetic for use in uses)
    largest = f"; the largest other one is {missed[0].key}" if missed else ""
    paths = ", ".join(str(each.path) for each in table.used)
    return (
        f"{name}: {len(uses) - len(missed)} of {len(uses)}, {tuned:.1%} of the arithmetic, from"
        f" {paths}{largest}"
    )


def _missed(table: Table) -> list[Use]:
    """List the products without an entry of their own, the largest first."""
    missed = [use for use in table.uses() if not use.hit]
    return sorted(missed, key=lambda use: (-use.key.arithmetic, str(use.key)))
