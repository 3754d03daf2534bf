import torch
from torch import distributed, multiprocessing

from lsq.dist.agreement import any_process

CPU = torch.device("cpu")


def test_one_process_decides_alone():
    assert any_process(True, CPU) and not any_process(False, CPU)


def _vote(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    votes = [any_process(flag, CPU) for flag in (False, rank == 0, rank == 1, True)]
    distributed.destroy_process_group()
    assert votes == [False, True, True, True]


def test_one_of_two_processes_is_enough(tmp_path):
    multiprocessing.spawn(_vote, args=(str(tmp_path),), nprocs=2)
