"""Planned memory of a training in fairseq, by a batch that bounds all that its options allow."""

import logging
from argparse import Namespace
from typing import Any

import torch
from fairseq import tasks, utils
from fairseq.data import Dictionary
from torch import nn

from lsq.fairseq import architectures, device
from lsq.fairseq.criterion import LSQLabelSmoothedCrossEntropyCriterion
from lsq.layers.memory import describe_memory, plan_memory
from lsq.native import loader
from lsq.run.backends import Backend
from lsq.run.planned import StepMemory
from lsq.run.step import StepPlan

logger = logging.getLogger(__name__)

REFUSED = (
    "{} computes its loss outside the model's layers; use --criterion"
    " lsq_label_smoothed_cross_entropy"
)


def bounding_batch(
    dictionary: Dictionary,
    *,
    max_tokens: int | None,
    max_sentences: int | None,
    max_positions: tuple[int, int],
    length_multiple: int = 1,
) -> dict[str, Any]:
    """Make a batch whose tensors are at least as large as those of any batch within these limits.

    With B sentences of S source and T target tokens, fairseq limits B * S and B * T to
    `max_tokens`. Then it pads S and T to a multiple of `length_multiple`. Tensors grow with B * S,
    B * T, or, inside attention, B * T * S. So they are bounded by the longest sentences, as many as
    reach `max_tokens`. Such a batch need not be possible.

    Args:
        dictionary: of the target.
        max_tokens, max_sentences: of a batch; ValueError unless one is given.
        max_positions: tokens of the longest source and target.
        length_multiple: lengths are padded to a multiple of this.
    """
    if max_tokens is None and max_sentences is None:
        raise ValueError(
            "memory cannot be planned without a limit: give --max-tokens or --batch-size"
        )
    source, target = (
        -(-min(length, max_tokens or length) // length_multiple) * length_multiple
        for length in max_positions
    )
    counts = [-(-max_tokens * length_multiple // min(source, target))] if max_tokens else []
    sentences = min([*counts, *([max_sentences] if max_sentences else [])])
    tokens = torch.full((sentences, target), dictionary.unk())
    return {
        "id": torch.arange(sentences),
        "nsentences": sentences,
        "ntokens": tokens.numel(),
        "net_input": {
            "src_tokens": torch.full((sentences, source), dictionary.unk()),
            "src_lengths": torch.full((sentences,), source),
            "prev_output_tokens": tokens,
        },
        "target": tokens,
    }


def plan_training(
    model: nn.Module, criterion: nn.Module, batch: dict[str, Any], mode: str
) -> StepMemory | None:
    """Plan the memory of `model` for batches bounded by `batch`, and log the plan. None if nothing
    is planned: with mode "naive", without the C++ library, or with other criterions than lsq's,
    which compute on logits themselves."""
    if mode != "naive" and not isinstance(criterion, LSQLabelSmoothedCrossEntropyCriterion):
        logger.warning("memory is not planned: %s", REFUSED.format(type(criterion).__name__))
        return None
    place = next(model.parameters()).device
    batch = utils.apply_to_sample(lambda tensor: tensor.to(place), batch)
    memory = plan_memory(model, lambda: criterion(model, batch)[0], mode=mode)
    if memory is None:
        reason = "--lsq-memory naive" if mode == "naive" else loader.description()
        logger.info("memory is not planned: %s", reason)
        return None
    plan, source = memory.step.plan, batch["net_input"]["src_tokens"]
    logger.info(
        "memory (%s): %d tensors of a training step in %.1f MiB, %.2f%% above the lower bound,"
        " bounded by %d sentences of %d and %d tokens",
        mode,
        len(plan.offsets),
        memory.arena.size / 2**20,
        100 * plan.gap,
        *source.shape,
        batch["target"].shape[1],
    )
    return memory


def describe_training(
    given: Namespace, vocabulary: int, backend: Backend | None = None
) -> StepPlan:
    """Plan a training step on `backend` by its options alone: no data is read and no layer
    computes; see `build_training`."""
    task, model, criterion = build_training(given, vocabulary)
    device.use(model, backend)
    batch = task.bounding_batch(model)
    return describe_memory(model, lambda: criterion(model, batch)[0])


def made_up_dictionary(size: int) -> Dictionary:
    """Make a dictionary of `size` words, fairseq's special ones included."""
    words = Dictionary()
    for number in range(len(words), size):
        words.add_symbol(f"word{number}")
    return words


def build_training(given: Namespace, vocabulary: int) -> tuple[Any, nn.Module, nn.Module]:
    """Build (task, model, criterion) of a training from fairseq-train's options and a made-up
    joined dictionary of `vocabulary` words; ValueError if the options do not fit."""
    architectures.model_of(given.arch)
    words = made_up_dictionary(vocabulary)
    task = tasks.TASK_REGISTRY[given.task](given, words, words)
    criterion = task.build_criterion(given)
    if not isinstance(criterion, LSQLabelSmoothedCrossEntropyCriterion):
        raise ValueError(REFUSED.format(type(criterion).__name__))
    return task, task.build_model(given), criterion
