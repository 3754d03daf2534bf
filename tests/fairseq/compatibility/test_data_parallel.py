from torch import nn

from lsq.fairseq.compatibility import CPUSafeDataParallel


def test_data_parallel_on_the_cpu_ignores_the_device(group):
    assert CPUSafeDataParallel(nn.Linear(2, 2), device_ids=[0], output_device=0).device_ids is None
