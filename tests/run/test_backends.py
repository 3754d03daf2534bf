"""The same operations on every backend from the same call, and the names that are refused."""

import copy
import logging

import pytest
import torch

from lsq.native import loader
from lsq.run import backends, cuda
from lsq.run.backends import backend
from tests.run.chains import chain, results


@pytest.mark.parametrize(
    "name", ["reference", "cpu", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_operations_run_one_after_another(name):
    where = backend(name)
    operations = chain(where.place)
    calls = [
        (one, [where.allocate(*wanted) for wanted in where.scratch(one)]) for one in operations
    ]
    run = where.prepare(calls)
    for again in range(2):
        operations[0].tokens.copy_(torch.tensor([2, 3, 4]) + again)
        run()
        for found, wanted in zip(results(operations), results(by_torch(operations)), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def by_torch(operations):
    """The same on the reference, from scratch."""
    copies = chain(torch.device("cpu"))
    copies[0].tokens.copy_(operations[0].tokens)
    for one in copies:
        one.store(one.reference())
    return copies


@pytest.mark.parametrize("name", ["reference", "cpu", "emulated"])
def test_one_operation_gets_its_own_scratch_memory(name):
    *_, loss = chain(torch.device("cpu"))
    loss.prediction.x.floats.copy_(torch.randn(loss.prediction.x.floats.shape))
    backend(name).run(loss)
    torch.testing.assert_close(loss.loss, loss.reference()["loss"].reshape(1))


@pytest.mark.parametrize("name", ["gpu", "CPU", "", "cuda:0"])
def test_other_names_are_refused(name):
    with pytest.raises(
        ValueError, match=f"backend is '{name}'; allowed: 'reference', 'cpu', 'cuda', 'emulated'"
    ):
        backend(name)


def test_there_is_one_of_each():
    assert backends.NAMES == ("reference", "cpu", "cuda", "emulated")
    assert backend("cpu") is backend("cpu") is not backend("reference")


def test_activations_are_those_that_a_backend_has(monkeypatch):
    emulated = backend("emulated")
    assert emulated.activations == torch.float32 and backend("emulated", torch.float32) is emulated
    narrow = backend("emulated", activations=torch.bfloat16)
    assert narrow.activations == torch.bfloat16 and narrow.device is emulated.device
    with pytest.raises(
        ValueError,
        match="activations are torch.bfloat16; the backend 'cpu' has them in torch.float32",
    ):
        backend("cpu", activations=torch.bfloat16)
    with pytest.raises(
        ValueError, match="activations are torch.float16; the backend 'emulated' has them in"
    ):
        backend("emulated", activations=torch.float16)
    monkeypatch.setattr(cuda, "gpu", lambda index: emulated.device)
    backends._on_gpu.cache_clear()
    assert (
        backend("cuda").activations
        == backends.for_device(torch.device("cuda", 0)).activations
        == torch.bfloat16
    )
    assert backend("cuda", torch.float32).activations == torch.float32
    backends._on_gpu.cache_clear()


def test_devices_that_nothing_runs_on_are_refused():
    with pytest.raises(
        ValueError, match="nothing of lsq runs on meta; move the tensors to one of: cpu, cuda"
    ):
        backends.for_device(torch.device("meta"))


def test_another_type_of_device_can_be_registered(monkeypatch):
    monkeypatch.setattr(backends, "_makers", dict(backends._makers))
    asked = []
    backends.register(
        "meta", lambda device, activations: asked.append(device) or backend("reference")
    )
    assert backends.for_device(torch.device("meta", 1)) is backend("reference")
    assert asked == [torch.device("meta", 1)]


@pytest.mark.parametrize("name", ["reference", "cpu", "emulated"])
def test_a_copy_of_a_module_has_the_same_backend(name):
    assert copy.deepcopy({"backend": backend(name)})["backend"] is backend(name)


def test_a_gpu_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cuda.gpu.cache_clear()
    with pytest.raises(RuntimeError, match="GPU"):
        backend("cuda")


def test_what_runs_on_a_device(monkeypatch, caplog):
    cpu = torch.device("cpu")
    assert backends.for_device(cpu) is backend("cpu")
    monkeypatch.setattr(loader, "_load", lambda: None)
    loader.library.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert backends.for_device(cpu) is backends.for_device(cpu) is backend("reference")
    loader.library.cache_clear()
    assert caplog.text.count("is not built") == 1


def test_memory_is_allocated_where_the_backend_works():
    made = backend("emulated").allocate((2, 3), torch.int32)
    assert (made.shape, made.dtype, made.device) == ((2, 3), torch.int32, torch.device("cpu"))
