"""Backends: which one runs where, the same operations on each, and what is refused."""

import copy
import gc
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


def test_it_needs_no_scratch_memory_and_no_library(monkeypatch):
    monkeypatch.setattr("lsq.native.loader.library", lambda: None)
    embed, norm, loss = chain(torch.device("cpu"))
    where = backend("reference")
    assert [list(where.scratch(one)) for one in (embed, norm, loss)] == [[], [], []]
    embed.weight = embed.weight.t().contiguous().t()
    where.prepare([(one, ()) for one in (embed, norm, loss)])()
    assert torch.equal(embed.x, embed.weight[embed.tokens] * 2.0 + embed.table[embed.tokens])
    assert loss.loss.isfinite().all() and loss.nll.isfinite().all()


CALLED = ("lsq_run_sequence", "lsq_finish_vocabulary_loss")
"""What the chain calls of the library when it runs."""


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


def prepare_all(operations):
    where = backend("cpu")
    return where.prepare(
        [(one, [where.allocate(*wanted) for wanted in where.scratch(one)]) for one in operations]
    )


def test_consecutive_loops_are_one_foreign_call(calls):
    embed, norm, _ = chain(torch.device("cpu"))
    run = prepare_all([embed, norm, embed, norm])
    assert calls == []
    run()
    run()
    assert calls == ["lsq_run_sequence"] * 2
    assert torch.equal(embed.x, embed.reference()["x"]) and norm.out.isfinite().all()


def test_loops_before_and_after_a_product_are_one_call_each(calls):
    embed, norm, loss = chain(torch.device("cpu"))
    prepare_all([embed, norm, loss, norm, embed])()
    assert calls == ["lsq_run_sequence", "lsq_finish_vocabulary_loss", "lsq_run_sequence"]
    assert all(found.isfinite().all() for found in results((embed, norm, loss)))


def test_nothing_at_all():
    prepare_all([])()


def test_a_prepared_run_keeps_its_tensors():
    embed, norm, loss = chain(torch.device("cpu"))
    loss_of, total = prepare_all([embed, norm, loss]), loss.loss
    loss_of()
    wanted = total.clone()
    del embed, norm, loss
    gc.collect()
    rubbish = [torch.full((3, 48), float("nan")) for _ in range(100)]
    loss_of()
    assert torch.equal(total, wanted) and len(rubbish) == 100


def test_what_a_loop_cannot_take_is_refused_before_anything_runs(calls):
    embed, norm, _ = chain(torch.device("cpu"))
    norm.out = norm.out.double()
    with pytest.raises(ValueError, match="^ResidualNorm.out is torch.float64"):
        prepare_all([embed, norm])
    assert calls == [] and embed.x.isnan().all()
