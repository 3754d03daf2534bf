"""Batches of a data set, and where a training goes on."""

from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from fairseq import tasks
from fairseq.data import data_utils, iterators
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer
from fairseq_cli import train as fairseq_train

from tests.dist.processes import run
from tests.fairseq.comparison import assert_equal_states
from tests.fairseq.two_workers import by_processes
from tests.sampling import first


def test_batches_that_cannot_be_are_refused_with_both_numbers():
    numbers, batch_by_size = numpy.array([7, 2, 4]), data_utils.batch_by_size
    with pytest.raises(ValueError, match="sentence 2 has 9 tokens, but a batch has at most 8"):
        batch_by_size(numbers, None, numpy.array([3, 9, 5]), max_tokens=8)
    with pytest.raises(ValueError, match="sentence 2 has 20 tokens"):
        batch_by_size([1, 2], lambda index: 10 * index, max_tokens=11)
    with pytest.raises(ValueError, match="no sentence is left"):
        batch_by_size([], None, numpy.array([]), max_tokens=8)
    batches = batch_by_size(numbers, None, numpy.array([3, 5, 9]), max_tokens=10)
    assert [list(batch) for batch in batches] == [[7, 2], [4]]


FAIRSEQ = "--arch transformer --criterion label_smoothed_cross_entropy"
ONE_LAYER = "--encoder-layers 1 --decoder-layers 1 --max-tokens 60 --update-freq 2"
LONG = 20
"""Updates: three epochs of six and a part of the fourth, of two batches each, the last one of an
epoch of one."""


@pytest.fixture
def sentences(monkeypatch):
    """The numbers of the sentences of every batch that was trained on."""
    seen, step = [], TranslationTask.train_step

    def train_step(task, sample, *rest, **options):
        seen.append(sample["id"].tolist())
        return step(task, sample, *rest, **options)

    monkeypatch.setattr(TranslationTask, "train_step", train_step)
    return seen


def a_checkpoint_for_every_update(args, folder: Path) -> None:
    args.save_dir, args.save_interval_updates, args.no_epoch_checkpoints = str(folder), 1, False


@pytest.mark.parametrize(
    "model", first(["--arch lsq_transformer", f"{FAIRSEQ} --task translation"], 0, 1)
)
def test_a_training_goes_on_in_any_epoch_bit_by_bit(parse, tmp_path, sentences, model):
    common = f"{model} {ONE_LAYER} --max-update {LONG}"
    args = parse(common)
    a_checkpoint_for_every_update(args, tmp_path / "whole")
    fairseq_train.main(convert_namespace_to_omegaconf(args))
    whole, last = list(sentences), torch.load(tmp_path / "whole" / "checkpoint_last.pt")
    updates = {
        f"checkpoint{name}": updates
        for name, updates in {"_1_3": 3, "1": 6, "_2_8": 8, "2": 12, "_3_15": 15, "3": 18}.items()
    }
    for name, done in updates.items():
        path = tmp_path / "whole" / f"{name}.pt"
        assert torch.load(path)["optimizer_history"][-1]["num_updates"] == done
        sentences.clear()
        args = parse(f"{common} --restore-file {path} --save-dir {tmp_path / name}")
        fairseq_train.main(convert_namespace_to_omegaconf(args))
        assert sentences == whole[-len(sentences) :] and len(sentences) >= LONG - done, name
        resumed = torch.load(tmp_path / name / "checkpoint_last.pt")
        assert_equal_states(resumed["model"], last["model"])


class Epochs:
    """The batches of a training in one of three processes, as fairseq's main loop asks for them."""

    EPOCHS = 4

    def __init__(self, args, rank: int, state: dict | None = None):
        self.cfg, self.task = convert_namespace_to_omegaconf(args), tasks.setup_task(args)
        self.trainer = SimpleNamespace(
            cfg=self.cfg,
            task=self.task,
            tpu=False,
            data_parallel_world_size=3,
            data_parallel_rank=rank,
            model=SimpleNamespace(max_positions=lambda: (1024, 1024)),
            reset_dummy_batch=lambda batch: None,
        )
        self.iterator = self.made(epoch=1 if state is None else state["epoch"], load_dataset=True)
        if state is not None:
            self.iterator.load_state_dict(state)

    def made(self, epoch: int, load_dataset: bool) -> EpochBatchIterator:
        sharded = self.task.has_sharded_data("train")
        return Trainer.get_train_iterator(
            self.trainer, epoch, load_dataset=load_dataset, disable_iterator_cache=sharded
        )

    def batches(self):
        """Yield (sentences of a batch, state of the iterator after it) of all epochs."""
        while self.iterator.next_epoch_idx <= self.EPOCHS:
            shuffle = self.iterator.next_epoch_idx > self.cfg.dataset.curriculum
            skip = self.cfg.optimization.skip_remainder_batch
            epoch = self.iterator.next_epoch_itr(shuffle=shuffle)
            for group in iterators.GroupedIterator(epoch, 2, skip_remainder_batch=skip):
                numbers = [batch["id"].tolist() if batch else [] for batch in group]
                yield numbers, self.iterator.state_dict()
            self.iterator = self.made(
                self.iterator.next_epoch_idx, load_dataset=self.task.has_sharded_data("train")
            )


OPTIONS = {
    "defaults": "",
    "grouped": "--grouped-shuffling",
    "two folders": "",
    "curriculum": "--curriculum 2",
    "seeds": "--update-ordered-indices-seed",
    "anew": "--update-epoch-batch-itr True",
    "whole groups": "--skip-remainder-batch",
}


@pytest.mark.parametrize("name", first(OPTIONS, 3))
def test_each_of_three_processes_goes_on_with_its_batches(parse, toy, name):
    args = parse(f"{FAIRSEQ} --encoder-layers 1 --decoder-layers 1 --max-tokens 40 {OPTIONS[name]}")
    if name == "two folders":
        args.data = f"{toy}:{toy}"
    for rank in range(3):
        whole = list(Epochs(args, rank).batches())
        states = [(state["epoch"], state["iterations_in_epoch"]) for _, state in whole]
        assert {epoch for epoch, _ in states} == {1, 2, 3, 4, 5}
        assert len({str(batches) for batches, _ in whole}) > len(whole) / 2
        middle, end = states.index((rank + 1, 2)), states.index((4 - rank, 0))
        for place in (middle, end):
            resumed = [batches for batches, _ in Epochs(args, rank, whole[place][1]).batches()]
            assert resumed == [batches for batches, _ in whole[place + 1 :]], (rank, states[place])


class Numbers(torch.utils.data.Dataset):
    """0, 1, 2, ..."""

    def __getitem__(self, index: int) -> int:
        return index


def iterator(shards: int, shard: int, epoch: int = 3, size: int = 1) -> EpochBatchIterator:
    """Over 17 numbers in batches of that size."""
    batches = [list(range(first, min(first + size, 17))) for first in range(0, 17, size)]
    place = {"num_shards": shards, "shard_id": shard, "epoch": epoch}
    return EpochBatchIterator(Numbers(), collate_fn=list, batch_sampler=batches, **place)


@pytest.mark.parametrize(("before", "now"), [(2, 3), (2, 1), (3, 2), (4, 3), (1, 4), (1, 1)])
@pytest.mark.parametrize("frequency", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_goes_on_with_another_number_of_processes(before, now, frequency, shuffle):
    """At any place no batch is left out, and fewer than `now` are seen twice."""
    items = list(range(17))
    for place in range(1, -(-len(items) // before)):
        seen, states = [], []
        for shard in range(before):
            part = iterator(before, shard)
            batches = islice(part.next_epoch_itr(shuffle=shuffle), place)
            seen += [item for batch in batches for item in batch]
            states.append(part.state_dict())
        after = []
        for shard in range(now):
            part = iterator(now, shard)
            part.load_state_dict(states[0])
            assert part.next_epoch_idx == 3
            groups = iterators.GroupedIterator(part.next_epoch_itr(shuffle=shuffle), frequency)
            after += [item for group in groups for batch in group for item in batch]
            assert part.end_of_epoch() and part.next_epoch_idx == 4
        assert sorted(set(seen + after)) == items
        assert len(seen) + len(after) - len(items) < now


@pytest.mark.parametrize("before, now", [(1, 4), (4, 1), (3, 4), (4, 3)])
@pytest.mark.parametrize("shards", [1, 2])
def test_an_epoch_goes_on_with_batches_of_another_size(caplog, before, now, shards):
    """At the same share of it, from any place, also where fairseq refuses."""
    part = iterator(shards, 0, size=before)
    epoch, total = part.next_epoch_itr(), len(iterator(shards, 0, size=now).frozen_batches)
    while True:
        next(epoch)
        state = part.state_dict()
        if part.end_of_epoch():
            break
        other = iterator(shards, 0, size=now)
        other.load_state_dict(state)
        share = epoch.n * shards / len(part.frozen_batches)
        assert other.next_epoch_idx == 3
        assert total * share - shards - 1 < other.iterations_in_epoch * shards <= total * share
        assert len(list(other.next_epoch_itr())) > 0 and other.end_of_epoch()
    said = f"epoch 3 has {len(part.frozen_batches)} batches, and now it has {total}, of which"
    assert said in caplog.text


def resumed(part: EpochBatchIterator, epoch: int, done: int) -> EpochBatchIterator:
    """From a checkpoint without a number of processes."""
    state = {"version": 2, "epoch": epoch, "iterations_in_epoch": done, "shuffle": False}
    part.load_state_dict(state)
    assert part.iterations_in_epoch == done
    return part


def test_groups_that_are_left_out_end_the_epoch():
    part = resumed(iterator(1, 0), 3, 4)
    epoch = part.next_epoch_itr(shuffle=False)
    groups = iterators.GroupedIterator(epoch, 3, skip_remainder_batch=True)
    found = [[item for batch in group for item in batch] for group in groups]
    assert found == [[4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14, 15]]
    assert len(groups) == groups.n == 6 and part.end_of_epoch()


def test_batches_that_every_epoch_makes_anew_are_those_of_its_epoch():
    """As audio tasks have them: a function of the data set and the epoch."""

    def batches(dataset, epoch: int) -> list[list[int]]:
        return [[10 * epoch + number] for number in range(3)]

    part = EpochBatchIterator(Numbers(), collate_fn=list, batch_sampler=batches, epoch=1)
    assert part.first_batch == [10]
    resumed(part, 2, 1)
    assert list(part.next_epoch_itr(shuffle=False)) == [[21], [22]]
    assert list(part.next_epoch_itr(shuffle=False)) == [[30], [31], [32]]


def test_who_has_no_batch_left_goes_along_with_the_first_of_the_training():
    trainer = SimpleNamespace(_dummy_batch=None)
    for batch in ("of the training", "of the validation"):
        Trainer.reset_dummy_batch(trainer, batch)
    assert trainer._dummy_batch == "of the training"


def _train(rank: int, args, runs: list[tuple[Path, dict]]) -> None:
    for folder, given in runs:
        args.save_dir, args.distributed_rank, args.distributed_world_size = str(folder), rank, 2
        for name, value in given.items():
            setattr(args, name, value)
        distributed_utils.call_main(convert_namespace_to_omegaconf(args), fairseq_train.main)


@pytest.mark.thorough
def test_two_processes_go_on_bit_by_bit(parse, tmp_path):
    """One of them is without a batch at the end of every epoch."""
    args = by_processes(parse(f"{ONE_LAYER} --update-freq 1 --max-update 16"))
    a_checkpoint_for_every_update(args, tmp_path / "whole")
    names = ["checkpoint1", "checkpoint_2_8", "checkpoint2"]
    again = [
        (tmp_path / name, {"restore_file": str(tmp_path / "whole" / f"{name}.pt")})
        for name in names
    ]
    run(_train, 2, args, [(tmp_path / "whole", {}), *again])
    whole = torch.load(tmp_path / "whole" / "checkpoint_last.pt")["model"]
    for folder, _ in again:
        assert_equal_states(torch.load(folder / "checkpoint_last.pt")["model"], whole)
