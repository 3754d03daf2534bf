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


def test_batch_beyond_max_tokens_names_both_numbers():
    sizes = numpy.array([3, 9, 5])
    with pytest.raises(ValueError, match="sentence 4 has 9 tokens, but a batch has at most 8"):
        data_utils.batch_by_size(numpy.array([7, 4, 2]), None, sizes, max_tokens=8)
    with pytest.raises(ValueError, match="sentence 2 has 20 tokens"):
        data_utils.batch_by_size([1, 2], lambda index: 10 * index, max_tokens=11)
    batches = data_utils.batch_by_size(
        numpy.array([7, 2, 4]), None, numpy.array([3, 5, 9]), max_tokens=10
    )
    assert [list(batch) for batch in batches] == [[7, 2], [4]]


def test_no_sentence_left():
    with pytest.raises(ValueError, match="no sentence is left"):
        data_utils.batch_by_size([], None, numpy.array([]), max_tokens=8)


FAIRSEQ = "--arch transformer --criterion label_smoothed_cross_entropy"
MODELS = {
    "lsq": "--arch lsq_transformer",
    "fairseq": FAIRSEQ,
    "fairseq's task": f"{FAIRSEQ} --task translation",
}
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


def updates_done(path: Path) -> int:
    return torch.load(path)["optimizer_history"][-1]["num_updates"]


@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS)
def test_a_training_goes_on_in_any_epoch_bit_by_bit(parse, tmp_path, sentences, model):
    common = f"{MODELS[model]} {ONE_LAYER} --max-update {LONG}"
    args = parse(common)
    a_checkpoint_for_every_update(args, tmp_path / "whole")
    fairseq_train.main(convert_namespace_to_omegaconf(args))
    whole, last = list(sentences), torch.load(tmp_path / "whole" / "checkpoint_last.pt")
    epochs = {path.stem for path in (tmp_path / "whole").glob("checkpoint[0-9].pt")}
    assert epochs == {"checkpoint1", "checkpoint2", "checkpoint3"}
    borders = {updates_done(tmp_path / "whole" / f"{name}.pt") for name in epochs}
    assert borders == {6, 12, 18}
    for name in (
        "checkpoint_1_3",
        "checkpoint1",
        "checkpoint_2_8",
        "checkpoint2",
        "checkpoint_3_15",
    ):
        path = tmp_path / "whole" / f"{name}.pt"
        sentences.clear()
        args = parse(f"{common} --restore-file {path} --save-dir {tmp_path / name}")
        fairseq_train.main(convert_namespace_to_omegaconf(args))
        assert sentences == whole[-len(sentences) :] and len(sentences) >= LONG - updates_done(
            path
        ), name
        resumed = torch.load(tmp_path / name / "checkpoint_last.pt")
        assert all(
            torch.equal(resumed["model"][key], last["model"][key]) for key in last["model"]
        ), name


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
        """Yields (batch's sentences, state of the iterator after it) up to the end of the last
        epoch."""
        while self.iterator.next_epoch_idx <= self.EPOCHS:
            shuffle = self.iterator.next_epoch_idx > self.cfg.dataset.curriculum
            skip = self.cfg.optimization.skip_remainder_batch
            epoch = self.iterator.next_epoch_itr(shuffle=shuffle)
            for group in iterators.GroupedIterator(epoch, 2, skip_remainder_batch=skip):
                yield (
                    [batch["id"].tolist() if batch else [] for batch in group],
                    self.iterator.state_dict(),
                )
            self.iterator = self.made(
                self.iterator.next_epoch_idx, load_dataset=self.task.has_sharded_data("train")
            )


OPTIONS = {
    "defaults": "",
    "curriculum": "--curriculum 2",
    "seeds": "--update-ordered-indices-seed",
    "anew": "--update-epoch-batch-itr True",
    "grouped": "--grouped-shuffling",
    "whole groups": "--skip-remainder-batch",
    "two folders": "",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=() if name in {"defaults", "grouped", "two folders"} else pytest.mark.thorough,
        )
        for name in OPTIONS
    ],
)
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
    return EpochBatchIterator(
        Numbers(),
        collate_fn=list,
        batch_sampler=batches,
        num_shards=shards,
        shard_id=shard,
        epoch=epoch,
    )


@pytest.mark.parametrize(("before", "now"), [(2, 3), (2, 1), (3, 2), (4, 3), (1, 4), (1, 1)])
@pytest.mark.parametrize("frequency", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_goes_on_with_another_number_of_processes(before, now, frequency, shuffle):
    """No batch is left out, and fewer than `now` are seen twice; at any place, also where fairseq
    refuses.

    With groups of another size as well: the epoch ends when all of its batches are done.
    """
    items = list(range(17))
    for place in range(1, -(-len(items) // before)):
        seen, states = [], []
        for shard in range(before):
            part = iterator(before, shard)
            seen += [
                item
                for batch in islice(part.next_epoch_itr(shuffle=shuffle), place)
                for item in batch
            ]
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
    assert (
        f"epoch 3 has {len(part.frozen_batches)} batches, and now it has {total}, of which"
        in caplog.text
    )


def test_groups_that_are_left_out_end_the_epoch():
    part = iterator(1, 0)
    part.load_state_dict({"version": 2, "epoch": 3, "iterations_in_epoch": 4, "shuffle": False})
    groups = iterators.GroupedIterator(
        part.next_epoch_itr(shuffle=False), 3, skip_remainder_batch=True
    )
    assert [[item for batch in group for item in batch] for group in groups] == [
        [4, 5, 6],
        [7, 8, 9],
        [10, 11, 12],
        [13, 14, 15],
    ]
    assert len(groups) == groups.n == 6 and part.end_of_epoch()


def test_checkpoints_without_a_number_of_processes_are_read_as_fairseq_does():
    part = iterator(1, 0)
    part.load_state_dict({"version": 2, "epoch": 1, "iterations_in_epoch": 2, "shuffle": False})
    assert part.iterations_in_epoch == 2


def test_batches_that_every_epoch_makes_anew_are_those_of_its_epoch():
    """As audio tasks have them: a function of the data set and the epoch."""

    def batches(dataset, epoch: int) -> list[list[int]]:
        return [[10 * epoch + number] for number in range(3)]

    part = EpochBatchIterator(Numbers(), collate_fn=list, batch_sampler=batches, epoch=1)
    assert part.first_batch == [10]
    part.load_state_dict({"version": 2, "epoch": 2, "iterations_in_epoch": 1, "shuffle": False})
    assert list(part.next_epoch_itr(shuffle=False)) == [[21], [22]]
    assert list(part.next_epoch_itr(shuffle=False)) == [[30], [31], [32]]


def test_who_has_no_batch_left_goes_along_with_the_first_of_the_training():
    trainer = SimpleNamespace(_dummy_batch=None)
    for batch in ("of the training", "of the validation"):
        Trainer.reset_dummy_batch(trainer, batch)
    assert trainer._dummy_batch == "of the training"


def _train(rank: int, args, runs: list[tuple[Path, dict]]) -> None:
    """Train one after another in the same processes: (save folder, further options) each."""
    for folder, given in runs:
        args.save_dir, args.distributed_rank, args.distributed_world_size = str(folder), rank, 2
        for name, value in given.items():
            setattr(args, name, value)
        distributed_utils.call_main(convert_namespace_to_omegaconf(args), fairseq_train.main)


@pytest.mark.thorough
def test_two_processes_go_on_bit_by_bit(parse, tmp_path):
    """One of them is without a batch at the end of every epoch."""
    args = parse(f"{ONE_LAYER} --update-freq 1 --max-update 16")
    args.distributed_init_method, args.distributed_no_spawn, args.distributed_backend = (
        "env://",
        True,
        "gloo",
    )
    a_checkpoint_for_every_update(args, tmp_path / "whole")
    names = ["checkpoint1", "checkpoint_2_8", "checkpoint2"]
    resumed = [
        (tmp_path / name, {"restore_file": str(tmp_path / "whole" / f"{name}.pt")})
        for name in names
    ]
    run(_train, 2, args, [(tmp_path / "whole", {}), *resumed])
    whole = torch.load(tmp_path / "whole" / "checkpoint_last.pt")["model"]
    for folder, _ in resumed:
        state = torch.load(folder / "checkpoint_last.pt")["model"]
        assert all(torch.equal(state[key], whole[key]) for key in whole), folder
