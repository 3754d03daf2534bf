"""Batches: sentences that fit into no batch, and where an epoch goes on.

fairseq makes batches in the first epoch of a process, from the seed and the number of that epoch.
So a training that resumes in epoch 3 would have other batches than one that began in epoch 1.
"""

import logging
import math
from collections.abc import Iterator

import numpy
from fairseq.data import data_utils, iterators
from fairseq.data.iterators import EpochBatchIterator
from fairseq.optim import FairseqOptimizer
from fairseq.trainer import Trainer

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""Adam's state of each parameter."""

_fairseq_batches = data_utils.batch_by_size
_fairseq_iterator_state = EpochBatchIterator.state_dict
_fairseq_load_iterator_state = EpochBatchIterator.load_state_dict
_fairseq_iterator_for_epoch = EpochBatchIterator._get_iterator_for_epoch
_fairseq_train_iterator = Trainer.get_train_iterator
_fairseq_load_optimizer = FairseqOptimizer.load_state_dict


def batch_by_size(indices, num_tokens_fn, num_tokens_vec=None, max_tokens=None, **options):
    """Replace data_utils.batch_by_size, which groups the sentences `indices` into batches;
    ValueError if there are none, or if one is longer than `max_tokens`."""
    if len(indices) == 0:
        raise ValueError(
            "no sentence is left to make batches of; all are longer than --max-tokens or the model"
            " allows"
        )
    if max_tokens is not None:
        sizes = num_tokens_vec
        if sizes is None:
            sizes = [num_tokens_fn(index) for index in indices]
        longest = int(numpy.argmax(sizes))
        if sizes[longest] > max_tokens:
            raise ValueError(
                f"sentence {indices[longest]} has {sizes[longest]} tokens, but a batch has at most"
                f" {max_tokens}; raise --max-tokens (--max-tokens-valid where it validates), or"
                " leave out sentences that long"
            )
    return _fairseq_batches(indices, num_tokens_fn, num_tokens_vec, max_tokens, **options)


def train_iterator(trainer: Trainer, epoch: int, **options: object) -> EpochBatchIterator:
    """Replace Trainer.get_train_iterator. Batches that all epochs share are made as in epoch 1.
    Batches that are made for each epoch (of data in several folders, or with
    --update-epoch-batch-itr) are made as in `epoch`."""
    if options.get("disable_iterator_cache") or trainer.cfg.dataset.update_epoch_batch_itr:
        return _fairseq_train_iterator(trainer, epoch, **options)
    iterator = _fairseq_train_iterator(trainer, 1, **options)
    dataset = trainer.task.dataset(trainer.cfg.dataset.train_subset)
    if iterator is trainer.task.dataset_to_epoch_iter.get(dataset):
        return iterator
    return _fairseq_train_iterator(trainer, epoch, **{**options, "load_dataset": False})


def keep_dummy_batch(trainer: Trainer, batch: object) -> None:
    """Replace Trainer.reset_dummy_batch: processes without a batch use the first training batch,
    since clips may be measured on it; fairseq's dummy may be a validation batch."""
    if trainer._dummy_batch is None:
        trainer._dummy_batch = batch


def iterator_state(iterator: EpochBatchIterator) -> dict:
    """Replace EpochBatchIterator.state_dict; it also keeps the numbers of batches and processes."""
    batches = {} if callable(iterator.batch_sampler) else {"batches": len(iterator.frozen_batches)}
    return {**_fairseq_iterator_state(iterator), "num_shards": iterator.num_shards, **batches}


def load_optimizer_state(
    optimizer: FairseqOptimizer, state: dict, overrides: dict | None = None
) -> None:
    """Replace FairseqOptimizer.load_state_dict, which assigns moments by the order of parameters
    alone; ValueError if the parameters have another number or other shapes."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    kept = [state["state"].get(number, {}) for number in numbers]
    if len(own) != len(kept) or any(
        moments[name].shape != parameter.shape
        for moments, parameter in zip(kept, own, strict=True)
        for name in MOMENTS
        if name in moments
    ):
        raise ValueError(
            "the checkpoint's optimizer is of other parameters than this model has (of an older"
            " version of lsq, or of other options); to train on from its weights alone, add"
            " --reset-optimizer"
        )
    _fairseq_load_optimizer(optimizer, state, overrides)


def load_iterator_state(iterator: EpochBatchIterator, state: dict) -> None:
    """Replace EpochBatchIterator.load_state_dict, which counts the batches of one process.

    If the number of processes has changed, no batch is skipped, and fewer batches are repeated than
    there are processes. If the number of batches has changed, the same share of the epoch is done.
    """
    shards = state.get("num_shards", iterator.num_shards)
    done = state.get("iterations_in_epoch", 0) * shards
    if callable(iterator.batch_sampler):  # it makes other batches for every epoch
        iterator._frozen_batches = None
    elif done:
        now = len(iterator.frozen_batches)
        before = state.get("batches", now)
        done = done * now // before
        if before != now:
            logger.warning(
                "the checkpoint's epoch %d has %d batches, and now it has %d, of which %d count as"
                " done: some sentences may be left out of this epoch or seen again in it",
                state["epoch"],
                before,
                now,
                done,
            )
    if shards != iterator.num_shards:
        logger.info(
            "the checkpoint is of %d processes, and now there are %d: of epoch %d, %d batches are"
            " done",
            shards,
            iterator.num_shards,
            state["epoch"],
            done // iterator.num_shards * iterator.num_shards,
        )
    _fairseq_load_iterator_state(
        iterator, {**state, "iterations_in_epoch": done // iterator.num_shards}
    )


def iterator_for_epoch(
    iterator: EpochBatchIterator,
    epoch: int,
    shuffle: bool,
    fix_batches_to_gpus: bool = False,
    offset: int = 0,
) -> Iterator | None:
    """Replace EpochBatchIterator._get_iterator_for_epoch: fairseq keeps a data loader, which would
    shuffle in all epochs as in the first one, so that --curriculum would never end."""
    if iterator.dataloader is not None:
        iterator.epoch_batch_sampler.shuffle = shuffle
        iterator.epoch_batch_sampler.fix_batches_to_gpus = fix_batches_to_gpus
    return _fairseq_iterator_for_epoch(iterator, epoch, shuffle, fix_batches_to_gpus, offset)


class GroupedIterator(iterators.CountingIterator):
    """Replace fairseq's GroupedIterator: batches in groups of --update-freq. From a position that
    is no multiple of `chunk_size`, fairseq counts one group too few and would begin the epoch
    again."""

    def __init__(
        self,
        iterable: iterators.CountingIterator,
        chunk_size: int,
        skip_remainder_batch: bool = False,
    ):
        done = getattr(iterable, "n", 0)
        groups = (len(iterable) - done) / chunk_size
        groups = math.floor(groups) if skip_remainder_batch else math.ceil(groups)
        if skip_remainder_batch:
            iterable.take(done + groups * chunk_size)
        start = math.ceil(done / chunk_size)
        chunks = iterators._chunk_iterator(iterable, chunk_size, skip_remainder_batch)
        super().__init__(chunks, start=start, total=start + groups)
        self.chunk_size = chunk_size
