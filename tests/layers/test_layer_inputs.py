import weakref

import pytest
import torch

from lsq.layers import LayerInputs
from lsq.layers.layer_inputs import KeptInput


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Blocks of 128 values, with scales rounded up to a bfloat16."""
    flat = torch.nn.functional.pad(x.detach().float().flatten(), (0, -x.numel() % 128))
    blocks = flat.view(-1, 128)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).view(torch.int32)
    scale = ((scale + 0xFFFF) & ~0xFFFF).view(torch.float32)
    values = (blocks / scale.clamp(min=1e-30)).round() * scale
    return values.flatten()[: x.numel()].view(x.shape).to(x.dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("in_folder", (False, True))
def test_the_backward_pass_reads_rounded_inputs(in_folder, dtype, tmp_path):
    inputs = LayerInputs(tmp_path if in_folder else None)
    torch.manual_seed(1)
    for _ in range(2):
        x = torch.randn(3, 7, 33, dtype=dtype, requires_grad=True)
        factor = torch.randn(33, dtype=dtype, requires_grad=True)
        y = inputs.checkpoint(lambda x, factor: (x * x).sin() * factor, x, factor)
        assert torch.equal(y, (x * x).sin() * factor)
        y.sum().backward()
        again = rounded(x).requires_grad_()
        exact = factor.detach().clone().requires_grad_()
        ((again * again).sin() * exact).sum().backward()
        torch.testing.assert_close(x.grad, again.grad)
        torch.testing.assert_close(factor.grad, exact.grad)
    assert list(tmp_path.iterdir()) == []


def test_an_input_takes_a_byte_a_value(tmp_path):
    kept = LayerInputs()._keep(torch.randn(4, 1000))
    assert kept.messages.data.nbytes <= 1.017 * 4000
    assert kept.restore().shape == (4, 1000)


def test_a_file_is_used_again_once_its_input_is_gone(tmp_path):
    inputs = LayerInputs(tmp_path)
    first, second = inputs._keep(torch.ones(300)), inputs._keep(torch.ones(300))
    addresses = {one.messages.data.data_ptr() for one in (first, second)}
    assert len(addresses) == 2
    del first, second
    third, fourth = inputs._keep(torch.ones(300)), inputs._keep(torch.ones(300))
    assert {one.messages.data.data_ptr() for one in (third, fourth)} == addresses


def test_layers_in_a_row_and_two_backward_passes(tmp_path):
    torch.manual_seed(2)
    layers = torch.nn.ModuleList(torch.nn.Linear(40, 40) for _ in range(3))
    inputs = LayerInputs(tmp_path)
    y = torch.randn(5, 40, requires_grad=True)
    for layer in layers:
        y = inputs.checkpoint(lambda x, layer=layer: layer(x).tanh(), y)
    loss = y.square().sum()
    loss.backward(retain_graph=True)
    once = [one.grad.clone() for one in layers.parameters()]
    loss.backward()
    for gradient, parameter in zip(once, layers.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


def test_what_is_not_rounded():
    inputs, seen = LayerInputs(), []
    double = torch.full((2, 3), 1 / 3, dtype=torch.float64, requires_grad=True)
    for x in (torch.ones(2, 3), torch.ones(0, 3, requires_grad=True), double):
        assert torch.equal(inputs.checkpoint(lambda x: x + 1, x), x + 1)
    weight = torch.ones(3, requires_grad=True)
    mask = torch.tensor([True, False, True])
    x = torch.full((2, 3), 1 / 3, requires_grad=True)
    inputs.checkpoint(lambda x, m: seen.append(m) or x * weight * m, x, mask).sum().backward()
    assert all(one is mask or torch.equal(one, mask) for one in seen)
    assert len(seen) == 2
    with torch.no_grad():
        assert torch.equal(inputs.checkpoint(lambda x: x + 1, x), x + 1)


def test_values_that_are_not_finite_stay_so():
    x = torch.tensor([1.0, torch.nan, torch.inf])
    kept = LayerInputs()._keep(x)
    assert isinstance(kept, KeptInput)
    assert not kept.restore().isfinite().all()


def test_nothing_holds_the_floats():
    inputs = LayerInputs()
    x = torch.randn(4, 33, requires_grad=True)
    before = x * 1
    memory = weakref.ref(before.untyped_storage())
    y = inputs.checkpoint(lambda one: one.sin().exp(), before)
    del before
    assert memory() is None
    y.sum().backward()
    assert x.grad is not None
