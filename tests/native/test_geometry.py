from types import SimpleNamespace

import pytest
import torch

from lsq.native import geometry


@pytest.mark.parametrize("multiprocessors", (58, 108, 132))
def test_sums_over_rows_fill_the_gpu_once(monkeypatch, multiprocessors):
    properties = SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {1: properties}.get)
    assert geometry.row_blocks(8192, 1024) == 2 * multiprocessors
    assert geometry.row_blocks(20, 1024) == 5  # of four rows at a time
    assert geometry.row_blocks(8192, 1024, most=geometry.MANY_BLOCKS) > 2 * multiprocessors


def test_sums_over_rows_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert geometry.row_blocks(8192, 1024) == 256
