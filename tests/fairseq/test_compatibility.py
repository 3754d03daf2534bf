import argparse
import io

import numpy
import omegaconf
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import data_utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.distributed.utils import _split_tensors_from_obj
from fairseq.file_io import PathManager
from torch import distributed, nn

from lsq.fairseq import compatibility
from lsq.fairseq.compatibility import CheckpointNotWritten, CPUSafeDataParallel


def reloaded(content):
    """`content` after a save and a strict load."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize(
    "content",
    [
        argparse.Namespace(arch="x", lr=[0.1]),
        numpy.float64(1.5),
        numpy.int64(3),
        numpy.array([1.0, 2.0], dtype=numpy.float32),
        omegaconf.OmegaConf.create({"task": {"data": "x", "n": 1}, "lr": [0.1, None], "flag": True}),
        omegaconf.OmegaConf.create({"args": argparse.Namespace(a=1)}, flags={"allow_objects": True}),
        _split_tensors_from_obj({"weights": torch.ones(2), "step": 1}, []),
    ],
    ids=lambda content: type(content).__name__,
)
def test_what_fairseq_saves_loads_strictly(content):
    found = reloaded({"content": content})["content"]
    assert numpy.all(found == content) and type(found) is type(content)


def test_other_types_are_still_refused():
    with pytest.raises(Exception, match="Weights only load failed"):
        reloaded({"content": nn.Linear(1, 1)})


def test_data_parallel_on_the_cpu_ignores_the_device(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = CPUSafeDataParallel(nn.Linear(2, 2), device_ids=[0], output_device=0)
        assert wrapped.device_ids is None
    finally:
        distributed.destroy_process_group()


@pytest.fixture
def on_a_full_disk():
    """on_a_full_disk(path): the next file that is written in the place of `path` finds no space."""
    return lambda path: path.with_name(f"{path.name}.tmp").symlink_to("/dev/full")


def test_save_is_whole_or_not_at_all(tmp_path, on_a_full_disk):
    path = tmp_path / "checkpoint1.pt"
    checkpoint_utils.torch_persistent_save({"x": torch.ones(10)}, str(path))
    before = path.read_bytes()
    for size in (1, 100_000):  # refused at the end, and in the middle
        on_a_full_disk(path)
        with pytest.raises(
            CheckpointNotWritten, match=r"could not write .*checkpoint1\.pt \(No space left on device\)"
        ):
            checkpoint_utils.torch_persistent_save({"x": torch.ones(size)}, str(path))
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]


def test_copy_is_whole_or_not_at_all(tmp_path, on_a_full_disk):
    source, target = tmp_path / "checkpoint1.pt", tmp_path / "checkpoint_last.pt"
    source.write_bytes(b"x" * 100)
    assert PathManager.copy(str(source), str(target), overwrite=True)
    assert target.read_bytes() == source.read_bytes()
    on_a_full_disk(target)
    with pytest.raises(CheckpointNotWritten, match="checkpoint_last"):
        PathManager.copy(str(source), str(target), overwrite=True)
    assert target.read_bytes() == source.read_bytes()
    assert sorted(tmp_path.iterdir()) == [source, target]
    with pytest.raises(FileExistsError):
        PathManager.copy(str(source), str(target))


def test_other_failures_of_a_save_are_not_disguised(tmp_path):
    with pytest.raises(Exception, match="pickle"):
        checkpoint_utils.torch_persistent_save({"x": lambda: 0}, str(tmp_path / "x.pt"))
    assert list(tmp_path.iterdir()) == []


def test_batch_beyond_max_tokens_names_both_numbers():
    sizes = numpy.array([3, 9, 5])
    with pytest.raises(ValueError, match="sentence 4 has 9 tokens, but a batch has at most 8"):
        data_utils.batch_by_size(numpy.array([7, 4, 2]), None, sizes, max_tokens=8)
    with pytest.raises(ValueError, match="sentence 2 has 20 tokens"):
        data_utils.batch_by_size([1, 2], lambda index: 10 * index, max_tokens=11)
    batches = data_utils.batch_by_size(numpy.array([7, 2, 4]), None, numpy.array([3, 5, 9]), max_tokens=10)
    assert [list(batch) for batch in batches] == [[7, 2], [4]]


def test_no_sentence_left():
    with pytest.raises(ValueError, match="no sentence is left"):
        data_utils.batch_by_size([], None, numpy.array([]), max_tokens=8)


def test_replaced_puts_everything_back():
    class Module:
        one, two = 1, 2

    with pytest.raises(KeyError), compatibility.replaced(Module, one=10, two=20):
        assert (Module.one, Module.two) == (10, 20)
        raise KeyError
    assert (Module.one, Module.two) == (1, 2)


class Numbers(torch.utils.data.Dataset):
    """0, 1, 2, ..."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(("before", "now"), [(2, 3), (2, 1), (3, 2), (4, 3), (1, 4)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_goes_on_with_another_number_of_processes(before, now, shuffle):
    """No batch is left out, and fewer than `now` are seen twice; at any place, also where fairseq refuses."""
    batches, epoch = [[number] for number in range(17)], 3
    items = list(range(len(batches)))

    def iterator(shards: int, shard: int) -> EpochBatchIterator:
        return EpochBatchIterator(
            Numbers(), collate_fn=list, batch_sampler=batches, num_shards=shards, shard_id=shard, epoch=epoch
        )

    for place in range(1, -(-len(batches) // before)):
        seen, states = [], []
        for shard in range(before):
            part = iterator(before, shard)
            started = part.next_epoch_itr(shuffle=shuffle)
            seen += [item for _ in range(place) for item in next(started)]
            states.append(part.state_dict())
        after = []
        for shard in range(now):
            part = iterator(now, shard)
            part.load_state_dict(states[0])
            assert part.next_epoch_idx == epoch
            after += [item for batch in part.next_epoch_itr(shuffle=shuffle) for item in batch]
        assert sorted(set(seen + after)) == items
        assert len(seen) + len(after) - len(items) < now


def test_checkpoints_without_a_number_of_processes_are_read_as_fairseq_does():
    part = EpochBatchIterator(Numbers(), collate_fn=list, batch_sampler=[[0], [1], [2]], num_shards=1)
    part.load_state_dict({"version": 2, "epoch": 1, "iterations_in_epoch": 2, "shuffle": False})
    assert part.iterations_in_epoch == 2
