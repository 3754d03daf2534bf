import subprocess
import sys

import pytest
import torch

from lsq.memory.scratch import Scratch, room


def test_tensors_are_zeros_with_storages_of_their_own(tmp_path):
    shapes = [((3, 5), torch.float32), ((7,), torch.int8), ((2, 1, 3), torch.bfloat16)]
    sizes = [torch.empty(shape, dtype=dtype).nbytes for shape, dtype in shapes]
    scratch = Scratch(tmp_path, sum(map(room, sizes)))
    tensors = [scratch.tensor(*one) for one in shapes]
    for tensor, (shape, dtype), size in zip(tensors, shapes, sizes, strict=True):
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert not tensor.any()
        assert tensor.untyped_storage().nbytes() == size
    for value, tensor in enumerate(tensors, 1):
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in tensors] == [[1], [2], [3]]
    scratch.prefetch(0, scratch.end)
    assert list(tmp_path.iterdir()) == []


def test_values_survive_pages_that_were_written_to_the_disk(tmp_path):
    scratch = Scratch(tmp_path, 1 << 20)
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))
    tensor = scratch.tensor(values.shape, torch.float32).copy_(values)
    scratch._pages.flush()
    scratch._pages.madvise(4)  # MADV_DONTNEED: the next access reads the file
    scratch.prefetch(4097, 1 << 19)
    assert torch.equal(tensor, values)


def test_a_tensor_outlives_the_object(tmp_path):
    tensor = Scratch(tmp_path, 256).tensor([4], torch.float32)
    assert tensor.fill_(2).sum() == 8


def test_a_folder_that_is_not_there_or_too_small(tmp_path):
    with pytest.raises(OSError, match="for 64 bytes of memory; name another folder") as found:
        Scratch(tmp_path / "none", 64)
    assert found.value.filename == str(tmp_path / "none")
    with pytest.raises(OSError, match="bytes of memory; name another folder"):
        Scratch(tmp_path, 1 << 55)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_killed_process_leaves_no_file(tmp_path):
    code = (
        "import os, sys, torch; from lsq.memory.scratch import Scratch;"
        "kept = Scratch(sys.argv[1], 4096).tensor([4], torch.int8); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -9
    assert list(tmp_path.iterdir()) == []
