"""The matrix products of a training and its translations on a GPU, from their options alone."""

from argparse import Namespace
from collections.abc import Iterable, Sequence
from copy import copy

import torch
from torch import nn

from lsq.fairseq.memory import bounding_batch, build_training
from lsq.gemm.product_key import EXACT_TOKENS, TOKEN_STEP, ProductKey
from lsq.layers.memory import rehearse_step
from lsq.program.program import Program
from lsq.run.cuda import products_of
from lsq.run.step import rehearsing


def products_of_training(
    given: Namespace,
    vocabulary: int,
    *,
    backward: Iterable[str],
    tokens: Sequence[int],
    rows: Sequence[int],
) -> list[ProductKey]:
    """Every product once: of a training step for each number of tokens, then of generation.

    The model is built, but no data is read and no layer computes. Products of attention's kernels
    are not among them.

    Args:
        given: fairseq-train's options with a task of lsq and a limit of batches.
        vocabulary: words of the joined dictionary.
        backward: values of --lsq-backward to take together.
        tokens: of batches, source and target alike.
        rows: of a step of generation: sentences times beam.

    Raises:
        ValueError: the options do not fit, or the architecture is not of lsq.
    """
    keys: list[ProductKey] = []
    models = []
    for mode in backward:
        options = copy(given)
        options.lsq_backward = mode
        options.lsq_clip_init = "fixed"  # nothing is measured: shapes are the same
        _, model, criterion = build_training(options, vocabulary)
        models.append((model, criterion))
    for count in tokens:
        for model, criterion in models:
            keys += products_of_programs(training_programs(model, criterion, count))
    for count in rows:
        keys += products_of_programs(generation_programs(models[0][0], count))
    return list(dict.fromkeys(keys))


def training_programs(model: nn.Module, criterion: nn.Module, tokens: int) -> list[Program]:
    """The programs of a training step on `tokens` source and target tokens, in sentences of one."""
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
    """The programs of encoding `rows` sentences of one word, and of one step of decoding.

    The model's clips are measured or fixed.
    """
    words = torch.full((rows, 1), model.decoder.dictionary.unk())
    model.eval()
    with rehearsing() as rehearsed:
        memory = (
            model.encoder(words, torch.ones(rows, dtype=torch.int64))
            if hasattr(model, "encoder")
            else None
        )
        model.decoder(words, memory, incremental_state={})
    return rehearsed.programs


def products_of_programs(programs: Iterable[Program]) -> list[ProductKey]:
    """Every product once, in the order of the programs; errors as of
    `lsq.run.cuda.products_of`."""
    keys = (key for program in dict.fromkeys(programs) for key in products_of(program))
    return list(dict.fromkeys(keys))


def token_counts(max_tokens: int, step: int) -> list[int]:
    """Numbers of tokens of batches, the largest first: `max_tokens`, and the multiples of `step`
    below it.

    Raises:
        ValueError: the step is not a multiple of 32, in whose steps products are looked up.
    """
    if step % TOKEN_STEP:
        raise ValueError(
            f"step is {step}; products are looked up in steps of {TOKEN_STEP} tokens: use a"
            " multiple"
        )
    return sorted({max_tokens, *range(step, max_tokens, step)}, reverse=True)


def generation_rows(beam: int, sentences: int) -> list[int]:
    """Rows of the steps of generation as sentences finish, the largest first: the beam times 1, 2,
    4 ... sentences."""
    counts = {sentences, *(2**power for power in range(sentences.bit_length()))}
    exact = {beam * count for count in counts if beam * count <= EXACT_TOKENS}
    return sorted({*exact, beam * sentences}, reverse=True)
