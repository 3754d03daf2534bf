"""Whether tensors still hold their values: counted writes, and those that PyTorch does not
count."""

import pytest
import torch

from lsq.native import loader
from lsq.run.stamp import SAMPLES, SMALL, Stamp, checksum


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize(
    "rows, dtype", [(1, torch.bfloat16), (7, torch.float32), (20_001, torch.float32)]
)
def test_a_checksum_sees_every_value_and_their_order(monkeypatch, library, rows, dtype):
    monkeypatch.setattr(loader, "available", lambda: library)
    x = torch.arange(1, 1 + 3 * rows).reshape(rows, 3).to(dtype)
    flat, before = x.view(-1), checksum(x)
    assert checksum(x.clone()) == before == checksum(x.t().contiguous().t())
    for place in (0, len(flat) // 2, -1):
        kept, flat[place] = flat[place].item(), -7.0
        assert checksum(x) != before
        flat[place] = kept
    flat[[0, -1]] = flat[[-1, 0]]
    assert checksum(x) != before


def write_by_numpy(x):
    x.detach().numpy()[3] += 1


def write_through_data(x):
    x.data[3] += 1


def write(x):
    with torch.no_grad():
        x[3] += 1


def move(x):
    x.data = x.data.clone()


@pytest.mark.parametrize("change", [write, write_through_data, write_by_numpy, move])
def test_one_value_is_seen(change):
    x = torch.nn.Parameter(torch.randn(1000))
    stamp = Stamp([x])
    assert stamp.holds([x])
    change(x)
    assert not stamp.holds([x])
    assert stamp.same_values([x]) == (change is move)


def test_of_large_tensors_few_rows_compare_samples():
    x = torch.nn.Parameter(torch.zeros(2 * SMALL))
    stamp = Stamp([x])
    x.data[1] = 1.0
    assert stamp.holds([x], rows=1) and not stamp.holds([x], rows=64)
    x.data[: 2 * x.numel() // SAMPLES] = 1.0
    assert not stamp.holds([x], rows=1)


def test_tensors_of_inference_mode():
    with torch.inference_mode():
        x = torch.ones(5)
    stamp = Stamp([x])
    assert stamp.holds([x])
    with torch.inference_mode():
        x[0] = 2.0
    assert not stamp.holds([x])
