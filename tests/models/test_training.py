"""Converted models under other dtypes, checkpointing, frozen weights, and without a batch."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lsq
from lsq.run.backends import CPU
from tests.constants import quant_with
from tests.layers.shapes import decibels
from tests.models.models import loss_of, model, tokens
from tests.sampling import first

QUANT = quant_with(calibration_passes=0)


def linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    made = nn.Linear(64, 96, dtype=dtype)
    lsq.convert(made, QUANT)
    return made


# Shapes


@pytest.mark.parametrize(
    "rows, inputs, outputs", first([(5, 133_200, 64), (133_200, 64, 64), (5, 64, 133_200)], 1)
)
def test_dimensions_longer_than_one_int32_sum(rows, inputs, outputs):
    torch.manual_seed(1)
    plain = nn.Linear(inputs, outputs)
    layer, x = copy.deepcopy(plain), torch.randn(rows, inputs, requires_grad=True)
    lsq.convert(layer, QUANT)
    upstream = torch.randn(rows, outputs) + 0.1  # whose mean the gradients of many rows have
    (y, slopes), (right, exact) = (
        (one(x), torch.autograd.grad((one(x) * upstream).sum(), [x, one.weight, one.bias]))
        for one in (layer, plain)
    )
    assert decibels(right, y) > 30
    assert all(decibels(wanted, found) > 20 for wanted, found in zip(exact, slopes, strict=True))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 1, 3), (2, 2, 2, 2)])
def test_any_leading_dimensions(shape):
    layer, x = linear(), torch.randn(*shape, 64)
    plain = lsq.revert(copy.deepcopy(layer))
    assert layer(x).shape == plain(x).shape
    assert decibels(plain(x), layer(x)) > 30


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 2)])
@pytest.mark.parametrize("trained", [True, False])
def test_empty_batches(shape, trained):
    whole = model()
    lsq.convert(whole)
    for layer in (whole.blocks[0].up, whole.blocks[0].mix.requires_grad_(trained)):
        x = torch.randn(*shape, layer.sizes[0], requires_grad=True)
        y = layer(x)
        assert y.shape == (*shape, 128)
        assert not layer.schedule.begun
        y.sum().backward()
        assert x.grad.shape == x.shape
        for parameter in layer.parameters():
            assert (parameter.grad is not None) == parameter.requires_grad
            assert parameter.grad is None or not parameter.grad.any()
        layer(torch.randn(3, layer.sizes[0]))


def test_a_transposed_input():
    layer, x = linear(), torch.randn(64, 5, 3)
    assert torch.equal(layer.eval()(x.permute(2, 1, 0)), layer(x.permute(2, 1, 0).contiguous()))


# Dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_and_inputs_of_other_floats(dtype):
    whole = model().to(dtype)
    plain = copy.deepcopy(whole)
    lsq.convert(whole)
    y = whole(tokens())
    assert y.dtype == dtype
    assert decibels(plain.float()(tokens()), y.float()) > 30
    loss_of(y).backward()
    for name, parameter in whole.named_parameters():
        clip = name.endswith("clip")
        assert parameter.dtype == (torch.float32 if clip else dtype), name
        assert parameter.grad is None or parameter.grad.dtype == parameter.dtype


def test_clips_stay_float32():
    layer = linear()
    layer(torch.randn(5, 64))
    before = {name: clip.detach().clone() for name, clip in layer.clips().items()}
    layer.to(torch.bfloat16).half().double().bfloat16()
    assert layer.weight.dtype == torch.bfloat16
    assert all(torch.equal(clip, before[name]) for name, clip in layer.clips().items())


def test_clips_that_a_wrapper_rounded_to_bfloat16():
    """As FSDP2's mixed precision does."""
    layer = linear(dtype=torch.bfloat16)
    for name in layer.clips():
        setattr(layer, name, nn.Parameter(getattr(layer, name).detach().bfloat16()))
    x = torch.randn(37, 64, dtype=torch.bfloat16)
    y = layer(x)
    assert layer.input_clip.dtype == torch.bfloat16 and 2 < layer.input_clip < 5
    assert decibels(lsq.revert(copy.deepcopy(layer))(x).float(), y.float()) > 30
    y.sum().backward()
    assert layer.weight_clip.grad.dtype == torch.bfloat16


def test_autocast():
    layer, x = linear(), torch.randn(5, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert layer(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.bfloat16()).dtype == torch.bfloat16


# What needs no gradient


@pytest.mark.parametrize("name", ["up", "mix"])
@pytest.mark.parametrize(
    "frozen", [("weight",), ("bias",), ("weight", "bias", "weight_clip", "input_clip"), ("x",), ()]
)
def test_what_is_wanted_is_what_it_always_was(name, frozen):
    torch.manual_seed(1)
    whole = model()
    lsq.convert(whole, quant_with(calibration_passes=0, clip_init="absmax"))
    layer = getattr(whole.blocks[0], name)
    x = torch.randn(11, layer.sizes[0], requires_grad=True)
    layer(x)

    def gradients() -> dict[str, torch.Tensor]:
        layer.zero_grad()
        x.grad = None
        torch.manual_seed(3)
        layer(1.5 * x if "x" not in frozen else (1.5 * x).detach()).square().sum().backward()
        return {
            "x": x.grad,
            **{name: parameter.grad for name, parameter in layer.named_parameters()},
        }

    expected = gradients()
    for one in set(frozen) - {"x"}:
        getattr(layer, one).requires_grad = False
    for one, gradient in gradients().items():
        if one in frozen:
            assert gradient is None
        else:
            assert torch.allclose(gradient, expected[one]) or one == "weight_clip", one


def test_a_frozen_layer_does_nothing_for_its_weight():
    layer = linear().requires_grad_(False)
    x = torch.randn(5, 64, requires_grad=True)
    with recorded_operations() as operations:
        layer(x).sum().backward()
        layer(x).sum().backward()
    assert operations.count("ProjectWeightGradient") == 0
    assert operations.count("ProjectInputGradient") == 2
    codes = layer.weight_state.kept["weight.codes"]
    layer(x)
    assert layer.weight_state.kept["weight.codes"] is codes
    with torch.no_grad():
        layer.weight.neg_()
    layer(x)
    assert torch.equal(layer.weight_state.kept["weight.codes"], -codes)


@contextmanager
def recorded_operations() -> Iterator[list[str]]:
    """The names of the operations that run inside, in their order."""
    names, prepare = [], CPU.prepare

    def noting(backend, calls):
        run = prepare(backend, calls)

        def noted():
            names.extend(operation.name for operation, _ in calls)
            run()

        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPU, "prepare", noting)
        yield names


# Running again


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(reentrant):
    plain = model()
    lsq.convert(plain)
    saving = copy.deepcopy(plain)
    for block in saving.blocks:
        block.forward = lambda x, run=block.forward: checkpoint(run, x, use_reentrant=reentrant)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, saving)]
    for step in range(9):
        for one, optimizer in zip((plain, saving), optimizers, strict=True):
            torch.manual_seed(step)
            loss_of(one(tokens())).backward()
            optimizer.step()
            optimizer.zero_grad()
        up = [one.blocks[0].up for one in (plain, saving)]
        assert [layer.schedule.passes for layer in up] == [step + 1] * 2
        assert torch.equal(*(layer.input_clip for layer in up)), step
        assert torch.equal(*(layer.weight_clip for layer in up)), step


def test_no_gradients_and_eval_mode():
    whole = model()
    lsq.convert(whole, QUANT)
    with torch.no_grad():
        first = whole.eval()(tokens())
    with torch.inference_mode():
        assert torch.equal(whole(tokens()), first)
    assert torch.equal(whole.train()(tokens()), first)
