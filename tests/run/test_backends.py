"""Backends: which one runs where, the same operations on each, and what is refused."""

import functools
import logging

import pytest
import torch

from lsq.native import loader
from lsq.ops.gradient_messages import MessageLayout, Messages, PackGradients
from lsq.run import backends, cuda
from lsq.run.backends import backend
from tests.ops.compare import allocated, on_reference, rubbish
from tests.ops.cuda import DTYPES
from tests.ops.gradient_checks import pack, unpack
from tests.run.chains import chain, results

CPU = torch.device("cpu")
LAYOUT = MessageLayout.for_values(1000, 3)
CALLED = ("lsq_run_sequence", "lsq_finish_vocabulary_loss")
"""What the chain calls of the library when it runs."""
EVERY = ("reference", "cpu", "emulated")


def prepare(operations, name: str = "cpu"):
    where = backend(name)
    return where.prepare(
        [(one, [where.allocate(*s) for s in where.scratch(one)]) for one in operations]
    )


@pytest.mark.parametrize("name", [*EVERY, pytest.param("cuda", marks=pytest.mark.gpu)])
def test_operations_run_one_after_another(name):
    operations = chain(backend(name).device)
    run = prepare(operations, name)
    for again in range(2):
        operations[0].tokens.copy_(torch.tensor([2, 3, 4]) + again)
        run()
        copies = chain(CPU)
        copies[0].tokens.copy_(operations[0].tokens)
        for one in copies:
            one.store(one.reference())
        for found, wanted in zip(results(operations), results(copies), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_one_operation_gets_its_own_scratch_memory(name):
    *_, loss = chain(CPU)
    loss.prediction.x.floats.copy_(torch.randn(loss.prediction.x.floats.shape))
    backend(name).run(loss)
    torch.testing.assert_close(loss.loss, loss.reference()["loss"].reshape(1))


@pytest.mark.parametrize("name", ["gpu", "CPU", "", "cuda:0"])
def test_other_names_are_refused(name):
    with pytest.raises(
        ValueError, match=f"backend is '{name}'; allowed: 'reference', 'cpu', 'cuda', 'emulated'"
    ):
        backend(name)


def test_activations_are_those_that_a_backend_has(monkeypatch):
    emulated = backend("emulated")
    assert emulated.activations == torch.float32 and backend("emulated", torch.float32) is emulated
    narrow = backend("emulated", activations=torch.bfloat16)
    assert narrow.activations == torch.bfloat16 and narrow.target is emulated.target
    for name, dtype in (("cpu", torch.bfloat16), ("emulated", torch.float16)):
        with pytest.raises(
            ValueError, match=f"activations are {dtype}; the backend '{name}' has them in torch.fl"
        ):
            backend(name, activations=dtype)
    monkeypatch.setattr(cuda, "gpu", lambda index: emulated.target)
    fresh = functools.cache(backends._on_gpu.__wrapped__)
    monkeypatch.setattr(backends, "_on_gpu", fresh)
    on_device = backends.for_device(torch.device("cuda", 0))
    assert backend("cuda").activations == on_device.activations == torch.bfloat16
    assert backend("cuda", torch.float32).activations == torch.float32


def test_what_runs_on_a_device(monkeypatch, caplog):
    with pytest.raises(
        ValueError, match="nothing of lsq runs on xpu; move the tensors to one of: cpu, cuda, meta"
    ):
        backends.for_device(torch.device("xpu"))
    assert backends.for_device(CPU) is backend("cpu")
    monkeypatch.setattr(loader, "_load", lambda: None)
    loader.library.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert backends.for_device(CPU) is backends.for_device(CPU) is backend("reference")
    loader.library.cache_clear()
    assert caplog.text.count("is not built") == 1


def test_a_gpu_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cuda.gpu.cache_clear()
    with pytest.raises(RuntimeError, match="GPU"):
        backend("cuda")


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_operation_runs_where_its_tensors_lie(dtype, built, monkeypatch):
    monkeypatch.setattr(loader, "available", lambda: built)
    operation = allocated(pack(torch.randn(1, 1000).to(dtype), LAYOUT), rubbish)
    backends.run(operation)
    wanted = on_reference(operation)
    assert torch.equal(operation.messages.data, wanted.messages.data)
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
    packing = allocated(pack(torch.randn(1, 5001), layout), rubbish)
    backends.run(packing)
    back = allocated(unpack(packing.messages.data[None], layout, factor=0.3), rubbish)
    backends.run(back)
    for one, written in ((packing, lambda op: op.messages.data), (back, lambda op: op.x)):
        on_gpu = one.bind(torch.Tensor.cuda)
        backends.run(on_gpu)
        assert torch.equal(written(on_gpu).cpu(), written(one))


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The names of the functions of the library that are called from here on."""
    library, made = loader.library(), []

    class Listening:
        def __getattr__(self, name: str):
            function = getattr(library, name)
            if name not in CALLED:
                return function
            return lambda *arguments: (made.append(name), function(*arguments))

    monkeypatch.setattr(loader, "library", Listening)
    return made


def test_consecutive_loops_are_one_foreign_call(calls):
    prepare([])()
    embed, norm, loss = chain(CPU)
    run = prepare([embed, norm, embed, norm])
    assert calls == []
    run()
    run()
    assert calls == ["lsq_run_sequence"] * 2
    assert torch.equal(embed.x, embed.reference()["x"]) and norm.out.isfinite().all()
    calls.clear()
    prepare([embed, norm, loss, norm, embed])()
    assert calls == ["lsq_run_sequence", "lsq_finish_vocabulary_loss", "lsq_run_sequence"]
    assert all(found.isfinite().all() for found in results((embed, norm, loss)))


def test_what_a_loop_cannot_take_is_refused_before_anything_runs(calls):
    embed, norm, _ = chain(CPU)
    norm.out = norm.out.double()
    with pytest.raises(ValueError, match="^ResidualNorm.out is torch.float64"):
        prepare([embed, norm])
    assert calls == [] and embed.x.isnan().all()


def test_the_meta_device_has_shapes_alone():
    meta = backends.for_device(torch.device("meta"))
    sent = meta.send([torch.ones(3), torch.ones(2, 5, dtype=torch.int8)])
    assert [(one.device.type, one.shape) for one in sent] == [("meta", (3,)), ("meta", (2, 5))]
    messages = Messages(layout=LAYOUT, data=torch.empty(3, LAYOUT.message_bytes, device="meta"))
    operation = PackGradients(x=torch.empty(1, 1000, device="meta"), messages=messages)
    meta.run(operation)
    meta.prepare([(operation, [])])()
    assert messages.data.is_meta
