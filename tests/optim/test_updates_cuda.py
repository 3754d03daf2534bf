"""Steps of many tensors at once on CUDA, in tables, against the same steps on the CPU."""

import copy
import math
import weakref

import pytest
import torch

from lsq.layers import QuantizedLinear
from lsq.layers.schedule import Schedule
from lsq.optim import Adam
from lsq.run.cuda import CUDA
from lsq.run.parameter_state import WeightCodes, state_of, withdraw
from tests.constants import quant_with
from tests.ops import cuda
from tests.ops.test_adam import codes_of

SHAPES = [(1,), (3,), (1023,), (1025,), (7, 5), (33, 48), (9001,), (0,)]


@pytest.fixture
def device():
    made = CUDA(cuda.current_device())
    made.transposed_weights = True  # as on some GPUs
    return made


def pair(device, **options):
    """Two optimizers of equal parameters, of the CPU and of the device."""
    torch.manual_seed(3)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [
        torch.nn.Parameter(parameter.detach().clone().to(device.device)) for parameter in ours
    ]
    return Adam(ours, lr=0.01, **options), Adam(theirs, lr=0.01, backend=device, **options)


def parameters(optimizer):
    return optimizer.param_groups[0]["params"]


def give_gradients(optimizers, bucket=False):
    """Equal ones; in a bucket on the device, where they begin anywhere."""
    ours, theirs = map(parameters, optimizers)
    flat = torch.randn(sum(parameter.numel() for parameter in ours) + 1)
    moved, begin = flat.to(theirs[0].device), 1
    for mine, other in zip(ours, theirs, strict=True):
        mine.grad = flat[begin : begin + mine.numel()].view_as(mine).clone()
        view = moved[begin : begin + mine.numel()].view_as(mine)
        other.grad = view if bucket else view.clone()
        begin += mine.numel()


def assert_same(optimizers):
    for mine, other in zip(*map(parameters, optimizers), strict=True):
        assert torch.equal(mine, other.cpu())
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(
                optimizers[0].state[mine][name], optimizers[1].state[other][name].cpu()
            ), name


def turns():
    """Three turns of each loop of the kernels that take tables, by tests.ops.test_turns_cuda."""
    target = CUDA(cuda.current_device())
    few = [
        torch.nn.Parameter(torch.randn(size, device=target.device)) for size in (1027, *[1] * 600)
    ]
    weight, clip = (
        torch.nn.Parameter(torch.rand(shape, device=target.device)) for shape in ((528, 272), (1,))
    )
    rounded = codes_of(clip, (528, 272)).bare()
    codes = WeightCodes((id(weight), id(clip)))
    codes.rounded = rounded.bind(lambda one: target.allocate(one.shape, one.dtype))
    codes.clip, state_of(weight).codes = weakref.ref(clip), codes
    optimizer = Adam([*few, weight], backend=target)
    for parameter in (*few, weight):
        parameter.grad = torch.ones_like(parameter)
    assert optimizer.clip_grad_norm(0.0).cpu() == pytest.approx(math.sqrt(1627 + 528 * 272))
    weight.grad[37, 200] = math.nan
    optimizer.step()
    assert codes.rounded.scale.isnan().all()


@pytest.mark.parametrize("bucket", [False, True])
def test_steps_are_those_of_the_cpu(device, bucket):
    optimizers = pair(device, weight_decay=0.1)
    for factor in (1.0, 0.25, torch.tensor([0.5])):
        give_gradients(optimizers, bucket)
        for optimizer in optimizers:
            optimizer.multiply_grads(factor)
            optimizer.step()
        assert_same(optimizers)


def test_tensors_may_leave_and_move(device):
    """Another set of gradients, other step numbers, other memory: what was prepared is not used for
    them."""
    optimizers = pair(device)
    for left_out in ((), (2, 4), (0,), ()):
        give_gradients(optimizers)
        for optimizer in optimizers:
            for number in left_out:
                parameters(optimizer)[number].grad = None
            optimizer.step()
            parameters(optimizer)[5].data = parameters(optimizer)[5].data.clone()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert_same(optimizers)


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_the_norm_is_that_of_the_cpu(device, max_norm):
    optimizers = pair(device)
    for _ in range(2):
        give_gradients(optimizers, bucket=True)
        norms = [optimizer.clip_grad_norm(max_norm) for optimizer in optimizers]
        torch.testing.assert_close(norms[1].cpu(), norms[0], rtol=1e-6, atol=0)
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(*map(parameters, optimizers), strict=True):
        torch.testing.assert_close(other.cpu(), mine)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_shows(device, value):
    optimizers = pair(device)
    give_gradients(optimizers)
    parameters(optimizers[1])[6].grad[8999] = value
    assert not optimizers[1].clip_grad_norm(0.0).isfinite()


def test_addresses_are_uploaded_only_when_they_change(device, monkeypatch):
    optimizers, uploads = pair(device), []
    optimizer = optimizers[1]
    give_gradients(optimizers)
    optimizer.step()
    prepared = optimizer._updates[device.device]
    original = prepared._upload
    monkeypatch.setattr(
        prepared, "_upload", lambda host, there: (uploads.append(host.dtype), original(host, there))
    )
    optimizer.step()
    assert uploads == [torch.float32]
    give_gradients(optimizers)
    optimizer.step()
    assert (
        uploads == [torch.float32, torch.uint8, torch.float32]
        and optimizer._updates[device.device] is prepared
    )


def test_memory_that_kernels_cannot_take_is_refused(device):
    parameter = torch.nn.Parameter(torch.zeros(9, device=device.device)[1:])
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="begins 4 bytes after a multiple of 16"):
        Adam([parameter], backend=device).step()


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_codes_are_those_of_the_pass(device, granularity, monkeypatch):
    """They are written by the step and taken by the next pass, and are those that the pass would
    make."""
    monkeypatch.setattr(Schedule, "weights_due", lambda *_: False)
    config = quant_with(
        weight_granularity=granularity,
        calibration_passes=0,
        clip_init="fixed",
        weight_clip=0.1,
        clip_step=0.01,
    )
    layer = QuantizedLinear(48, 64, quant=config).to(device.device)
    layer.backend = device
    optimizer, x = (
        Adam(layer.parameters(), lr=0.3, backend=device),
        torch.randn(5, 48, device=device.device),
    )
    for number in range(3):
        clip = layer.weight_clip.detach().clone()
        layer(x).square().sum().backward()
        optimizer.step()
        if number:
            assert ((layer.weight_clip / clip - 1).abs() <= 0.0101).all() and not torch.equal(
                layer.weight_clip, clip
            )
        codes, scale = (layer.weight_state.kept[f"weight.{name}"] for name in ("codes", "scale"))
        turned = layer.weight_state.kept.get("weight.codes.transposed")
        names = layer.weight_state.kept.keys()
        written = state_of(layer.weight).codes
        assert written.current(names, layer.weight, layer.weight_clip)
        assert turned is None or torch.equal(turned, codes.t())
        made = codes.clone(), scale.clone()
        withdraw(layer.weight)
        layer(x)
        assert torch.equal(codes, made[0]) and torch.equal(scale, made[1])


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_a_weight_that_is_not_a_number_poisons_its_scale(device, granularity):
    config = quant_with(weight_granularity=granularity, calibration_passes=0, clip_init="fixed")
    layer = QuantizedLinear(48, 64, quant=config).to(device.device)
    layer.backend = device
    optimizer = Adam(layer.parameters(), backend=device)
    layer(torch.randn(5, 48, device=device.device)).sum().backward()
    layer.weight.grad[40, 7] = math.nan
    optimizer.step()
    poisoned = layer.weight_state.kept["weight.scale"].isnan()
    assert poisoned.all() if granularity == "tensor" else poisoned.nonzero().tolist() == [[40]]
