"""Which backend runs where, and what single operations may not do."""

import pytest
import torch

from lsq.native import loader
from lsq.ops.gradient_layout import MessageLayout
from lsq.ops.gradient_messages import Messages, PackGradients
from lsq.run import backends
from tests.ops.compare import allocated, on_reference, rubbish
from tests.ops.cuda import DTYPES
from tests.ops.gradient_checks import pack, unpack

LAYOUT = MessageLayout.for_values(1000, 3)


def test_names():
    assert [type(backends.backend(name)).__name__ for name in backends.NAMES if name != "cuda"] == [
        "Reference",
        "CPU",
        "CUDA",
    ]
    with pytest.raises(ValueError, match="backend is 'tpu'; allowed: 'reference', 'cpu'"):
        backends.backend("tpu")


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_operation_runs_where_its_tensors_lie(dtype, built, monkeypatch):
    monkeypatch.setattr(loader, "available", lambda: built)
    operation = allocated(pack(torch.randn(1, 1000).to(dtype), LAYOUT, error=True), rubbish)
    backends.run(operation)
    wanted = on_reference(operation)
    assert torch.equal(operation.messages.data, wanted.messages.data) and torch.equal(
        operation.error, wanted.error
    )
    back = allocated(unpack(operation.messages.data[None], LAYOUT, dtype=dtype), rubbish)
    backends.run(back)
    assert torch.equal(back.x, on_reference(back).x)


def test_tensors_of_several_devices_are_refused():
    elsewhere = torch.zeros(1, 1000, device="meta")
    messages = torch.zeros(3, LAYOUT.message_bytes, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match="PackGradients was given a tensor on meta, but runs on cpu"
    ):
        backends.run(PackGradients(x=elsewhere, messages=Messages(layout=LAYOUT, data=messages)))


@pytest.mark.gpu
def test_operations_on_a_gpu():
    layout = MessageLayout.for_values(5001, 3)
    operation = allocated(pack(torch.randn(1, 5001), layout), rubbish)
    on_gpu = operation.bind(torch.Tensor.cuda)
    for one in (operation, on_gpu):
        backends.run(one)
    assert torch.equal(on_gpu.messages.data.cpu(), operation.messages.data)
    back = allocated(unpack(operation.messages.data[None], layout, factor=0.3), rubbish)
    back_on_gpu = back.bind(torch.Tensor.cuda)
    for one in (back, back_on_gpu):
        backends.run(one)
    assert torch.equal(back_on_gpu.x.cpu(), back.x)
