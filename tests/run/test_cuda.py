"""GPUs and their emulator: lists of launches, what they read, and why a GPU cannot be used."""

import copy
import dataclasses
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lsq.config import LayerConfig, QuantConfig
from lsq.layers import QuantizedLinear, TransformerEncoderLayer, programs
from lsq.layers.blocks import PackedSequences
from lsq.layers.memory import plan_memory, release_memory
from lsq.layers.programs import Mode
from lsq.native import compiler
from lsq.native.launch import launch
from lsq.native.launch_list import LaunchList
from lsq.ops import vocabulary_loss_cuda
from lsq.ops.gradient_messages import MessageLayout, Messages, UnpackGradients
from lsq.ops.rounding import Add
from lsq.run import cuda as run_cuda
from lsq.run.backends import backend
from lsq.run.cuda import CUDA, AbsentGPU, emulated_device, gpu_fault
from lsq.run.executor import profile
from lsq.run.frames import Slot
from tests.layers.shapes import config_of
from tests.ops import cuda
from tests.ops.compare import allocated, on_reference, rubbish
from tests.ops.gradient_checks import pack
from tests.run.chains import WORDS, chain


@pytest.fixture
def where() -> CUDA:
    """The backend on the device of the test."""
    return CUDA(cuda.current_device())


def test_what_a_kernel_cannot_take_is_refused_with_its_name(where):
    embed, norm, _ = chain(where.device)
    embed.x = embed.x.t().contiguous().t()
    with pytest.raises(ValueError, match="^Embed.x is torch.float32 with strides"):
        where.prepare([(embed, ())])
    embed, norm, _ = chain(where.device)
    norm.out = torch.empty(3 * 48 + 1, device=where.device)[1:].view(3, 48)
    with pytest.raises(ValueError, match="^ResidualNorm.out: a tensor begins 4 bytes after"):
        where.prepare([(embed, ()), (norm, ())])


def slot(operation, name: str) -> Slot:
    """That of the tensor with this dotted name."""
    (leaf,) = (leaf for leaf in operation.leaves() if leaf.name == name)
    return Slot(operation, leaf)


def test_tensors_that_were_the_same_at_first_may_part(where):
    x, y = torch.randn(2, 41, 48).to(where.device)
    add = Add(a=x, b=x, out=torch.empty_like(x))
    run = where.prepare([(add, ())])
    slot(add, "b").put(y)
    run()
    assert torch.equal(add.out, x + y)


def test_parts_of_a_tensor_move_with_it(where, monkeypatch):
    # several products, each of a part of the rows
    monkeypatch.setattr(vocabulary_loss_cuda, "CUDA_BLOCK_ROWS", 8)
    _, _, loss = chain(where.device)
    loss.prediction.x.floats, loss.prediction.target = (
        torch.randn(21, 48).to(where.device),
        torch.randint(0, WORDS, (21,)).to(where.device),
    )
    run = where.prepare([(loss, [where.allocate(*wanted) for wanted in where.scratch(loss)])])
    for _ in range(2):
        run()
        torch.testing.assert_close(
            loss.loss.cpu(), loss.bind(torch.Tensor.cpu).reference()["loss"].reshape(1)
        )
        slot(loss, "prediction.x.floats").put(torch.randn(21, 48).to(where.device))


def foreign_memory(op):
    other = torch.zeros(48, device=op.a.device)
    return [launch("elementwise.cu", "lsq_add", op, other, grid=1, FLOAT=0)]


def another_operation(op):
    return launches(dataclasses.replace(op, a=op.b))


launches = Add.cuda


@pytest.mark.parametrize(
    "cuda_side, message",
    [
        (foreign_memory, "neither a field of the operation nor its scratch memory"),
        (another_operation, "another operation than its own"),
    ],
)
def test_what_a_launch_may_not_read_is_refused(where, monkeypatch, cuda_side, message):
    x = torch.randn(41, 48).to(where.device)
    monkeypatch.setattr(Add, "cuda", cuda_side)
    with pytest.raises(ValueError, match=f"Add: lsq_add .*{message}"):
        where.prepare([(Add(a=x, b=x, out=torch.empty_like(x)), ())])


LAYOUT = MessageLayout.for_values(1000, 3)


@pytest.fixture
def emulated() -> CUDA:
    """The emulator; it keeps two lists."""
    return CUDA(emulated_device(), kept=2)


@pytest.fixture
def made(emulated, monkeypatch) -> list:
    """Grows with each list that is made."""
    lists = []
    monkeypatch.setattr(
        run_cuda, "LaunchList", lambda *given: lists.append(1) or LaunchList(*given)
    )
    return lists


def test_launches_are_kept_for_the_same_memory(emulated, made):
    packing = allocated(pack(torch.randn(1, 1000), LAYOUT), rubbish)
    for _ in range(3):
        packing.x.normal_()
        emulated.run(packing.bind(lambda tensor: tensor))
        wanted = on_reference(packing).messages.data
        assert torch.equal(packing.messages.data, wanted) and len(made) == 1
    messages, back = Messages(layout=LAYOUT, data=packing.messages.data[None]), torch.empty(1000)
    emulated.run(UnpackGradients(messages=messages, x=back))
    emulated.run(UnpackGradients(messages=messages, x=back, factor=2.0))
    assert len(made) == 3
    emulated.run(packing)  # dropped meanwhile
    assert len(made) == 4 and torch.equal(packing.messages.data, wanted)


def test_kept_launches_keep_no_tensor(emulated):
    packing = allocated(pack(torch.randn(1, 1000), LAYOUT), rubbish)
    emulated.run(packing)
    alive = weakref.ref(packing.x)
    del packing
    assert alive() is None


def test_memory_that_is_not_aligned_is_refused(emulated):
    packing = allocated(pack(torch.zeros(1, 1001)[:, 1:].view(-1)[None], LAYOUT), rubbish)
    with pytest.raises(
        ValueError, match="PackGradients.*a tensor begins 4 bytes after a multiple of 16"
    ):
        emulated.run(packing)


def test_threads_share_the_launches(emulated):
    x = torch.randn(1, 1000)
    wanted = on_reference(pack(x, LAYOUT)).messages.data

    def work(_):
        packing = allocated(pack(x, LAYOUT), rubbish)
        for _ in range(5):
            emulated.run(packing)
        return torch.equal(packing.messages.data, wanted)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


@pytest.fixture
def capability(monkeypatch):
    """capability(major, minor): PyTorch sees one such GPU, with a driver that supports CUDA 13.0,
    and libraries."""

    class Driver:
        version = (13, 0)

        def __init__(self, path, ordinal):
            assert (path, ordinal) == ("libcuda.so.1", 0)

    def capability(*found: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: found)
        monkeypatch.setattr(run_cuda, "Driver", Driver)
        monkeypatch.setattr(run_cuda, "find_cublaslt", lambda: "libcublasLt.so")
        monkeypatch.setattr(run_cuda, "ProductLibrary", lambda path: None)
        monkeypatch.setattr(compiler, "version", lambda: "13.0")

    return capability


def missing(*arguments):
    raise RuntimeError(
        "no libcublasLt was found: install CUDA's libraries with `pip install '.[cuda13]'`"
    )


@pytest.mark.parametrize(
    "found, index, changed, fault",
    [
        ((8, 0), 0, None, None),
        ((8, 0), 1, None, "no GPU 1"),
        ((7, 5), 0, None, "compute capability 7.5; lsq's CUDA kernels need 8.0"),
        (
            (9, 0),
            0,
            (compiler, "version", lambda: "14.1"),
            "supports CUDA 13.0, but kernels are compiled by NVRTC 14.1",
        ),
        ((9, 0), 0, (run_cuda, "find_cublaslt", missing), "pip install '.[cuda13]'"),
        ((9, 0), 0, (run_cuda, "ProductLibrary", missing), "pip install '.[cuda13]'"),
        ((9, 0), 0, (compiler, "version", missing), "no libcublasLt"),
        ((9, 0), 0, (torch.cuda, "is_available", lambda: False), "there is no GPU 0 that PyTorch"),
    ],
)
def test_why_a_gpu_cannot_be_used(capability, monkeypatch, found, index, changed, fault):
    capability(*found)
    if changed is not None:
        monkeypatch.setattr(*changed)
    said = gpu_fault(index)
    assert said is None if fault is None else fault in said


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
def test_programs_are_those_of_a_gpu(activations):
    config = LayerConfig(hidden=32, heads=2, feed_forward=64, quant=QuantConfig(backward="int8"))
    absent, present = AbsentGPU(activations), backend("emulated", activations)
    modes = [Mode(training=True, backward=True, backend=one) for one in (absent, present)]
    found, wanted = (
        str(programs.encoder_layer(config, PackedSequences(rows=16, count=2), mode))
        for mode in modes
    )
    assert found == wanted and "StartScales" in found and "FinishSums" in found
    assert absent.few_sizes == present.few_sizes


# Whole layers: one list for a pass, whose inputs and gradients may move

WHOLE_LAYERS = pytest.mark.skipif(cuda.SANITIZE, reason="compiles the kernels of a layer")


@pytest.fixture(params=[pytest.param(torch.float32, marks=pytest.mark.thorough), torch.bfloat16])
def layers(request):
    """(on planned memory, on fresh memory): the same layer, with measured clips."""
    torch.manual_seed(0)
    where = CUDA(cuda.current_device(), activations=request.param)
    fresh = TransformerEncoderLayer(config_of(backward="int8", dropout=0.1, calibration_passes=0))
    fresh = fresh.to(where.device)
    fresh.backend = where
    fresh(torch.randn(3, 2, 48).to(where.device))
    planned = copy.deepcopy(fresh)
    plan_memory(planned, lambda: planned(torch.ones(5, 2, 48, device=where.device)).sum())
    return planned, fresh


def step(layer, x: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    """Result and gradients of one pass there and back; none is left on the layer."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(upstream)
    found = [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]
    found = [tensor.clone() for tensor in found]
    layer.zero_grad()
    return found


@pytest.mark.thorough
@WHOLE_LAYERS
def test_a_pass_that_comes_again_is_one_list_and_gives_the_same_bits(layers, monkeypatch):
    planned, fresh = layers
    runs, run, weights = [], LaunchList.run, 4
    for number in range(4):
        x, upstream = torch.randn(2, 4, 2, 48).to(
            planned.backend.device, planned.backend.activations
        )
        if number == 2:  # parameters, too, lie elsewhere from now on
            for parameter in planned.parameters():
                parameter.data = parameter.data.clone()
        with monkeypatch.context() as patch:
            patch.setattr(LaunchList, "run", lambda self: (runs.append(self), run(self)))
            runs.clear()
            expected = step(fresh, x, upstream)
            assert len(runs) == weights + 2
            runs.clear()
            found = step(planned, x, upstream)
        for name, one, other in zip(
            ["y", "dx", *dict(fresh.named_parameters())], found, expected, strict=True
        ):
            assert torch.equal(one, other), (number, name)
    assert len(runs) == weights + 2 and len(planned.step_memory.prepared) == 2


@pytest.mark.thorough
@WHOLE_LAYERS
def test_scratch_memory_may_lie_elsewhere_in_every_run(layers):
    _, layer = layers
    x, upstream = torch.randn(2, 16, 4, 48).to(layer.backend.device, layer.backend.activations)
    others = []
    with profile():
        expected = step(layer, x, upstream)
    for _ in range(3):
        others += [torch.empty(size, device=x.device) for size in range(1 << 12, 1 << 18, 1 << 13)]
        assert all(map(torch.equal, step(layer, x, upstream), expected))


@WHOLE_LAYERS
def test_memory_that_is_not_aligned_is_refused_when_a_pass_comes_again():
    layer = QuantizedLinear(48, 32, quant=config_of().quant)
    layer.backend = CUDA(cuda.current_device())
    layer = layer.to(layer.backend.device)
    plan_memory(layer, lambda: layer(torch.ones(8, 48, device=layer.backend.device)).sum())
    memory = torch.randn(8 * 48 + 1).to(layer.backend.device)
    for _ in range(3):
        layer(memory[:-1].view(8, 48)).sum().backward()
    with pytest.raises(ValueError, match="^x: a tensor begins 4 bytes"):
        layer(memory[1:].view(8, 48))
    release_memory(layer)
    with pytest.raises(ValueError, match="x: a tensor begins 4 bytes"):
        layer(memory[1:].view(8, 48))
