"""Adam on codes, with 8-bit moments, inside backward passes; its states and those of others."""

import copy
import io
import math

import pytest
import torch
from torch import nn

import lsq
from lsq.optim import Adam, moments
from lsq.quant import compact


def net(seed: int = 3, codes: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 64))
    lsq.convert(made)
    if codes:
        lsq.train_codes(made)
    return made


def batches(count: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    mixing = torch.randn(64, 64, generator=chance) / 8
    rows = [torch.randn(32, 64, generator=chance) for _ in range(count)]
    return [(x, (x @ mixing).relu()) for x in rows]


def train(model: nn.Module, optimizer: Adam, data, seed: int = 5) -> list[float]:
    torch.manual_seed(seed)
    found = []
    for x, y in data:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("codes", [False, True])
def test_training_is_as_with_floats(codes, bits):
    plain, model = net(codes=False), net(codes=codes)
    wanted = train(plain, Adam(plain.parameters(), lr=1e-2), batches(30))
    found = train(model, Adam(model.parameters(), lr=1e-2, moment_bits=bits), batches(30))
    assert wanted[-1] < 0.5 * wanted[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0.05, atol=0)


@pytest.mark.parametrize("codes", [False, True])
def test_steps_in_the_backward_pass_are_the_same(codes):
    results = []
    for inside in (False, True):
        model = net(codes=codes)
        optimizer = Adam(model.parameters(), lr=1e-2, moment_bits=8, weight_decay=0.1)
        if inside:
            assert optimizer.step_in_backward() is optimizer
        losses = train(model, optimizer, batches(6))
        results.append((losses, [one.detach().clone() for one in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))


def test_gradients_of_matrices_are_freed_in_the_backward_pass():
    model = net()
    optimizer = Adam(model.parameters(), lr=1e-2, moment_bits=8).step_in_backward()
    (model(torch.randn(4, 64)).square().mean()).backward()
    assert [one.grad is None for one in model.parameters()] == [
        one.dim() > 1 or not one.requires_grad for one in model.parameters()
    ]
    optimizer.step()


def test_training_goes_on_bit_by_bit_after_a_resume():
    model = net()
    optimizer = Adam(model.parameters(), lr=1e-2, moment_bits=8)
    train(model, optimizer, batches(5))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    wanted = train(model, optimizer, batches(5, seed=2), seed=7)

    other = net(seed=9)
    again = Adam(other.parameters(), lr=1.0, moment_bits=8)
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert train(other, again, batches(5, seed=2), seed=7) == wanted
    assert all(
        torch.equal(one.detach().clone(), two.detach().clone())
        for one, two in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_states_change_their_bits():
    model = net()
    optimizer = Adam(model.parameters(), lr=1e-2, moment_bits=8)
    train(model, optimizer, batches(5))
    weight = model[0].weight
    wanted = moments.with_bits(optimizer.state[weight], weight, 32)
    floats = Adam(model.parameters(), lr=1e-2)
    floats.load_state_dict(optimizer.state_dict())
    assert floats.state[weight]["exp_avg"].shape == weight.shape
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(floats.state[weight][name], wanted[name])
    back = Adam(model.parameters(), lr=1e-2, moment_bits=8)
    back.load_state_dict(floats.state_dict())
    for name, one in optimizer.state[weight].items():
        assert name == "step" or (one.float() - back.state[weight][name].float()).abs().max() <= 1
    train(model, back, batches(1))


def test_states_of_torch_are_loaded():
    plain = net(codes=False)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, theirs, batches(4))
    ours = Adam(plain.parameters(), lr=1e-2, moment_bits=8)
    ours.load_state_dict(theirs.state_dict())
    weight = plain[0].weight
    assert ours.state[weight]["exp_avg"].dtype == torch.uint8 and ours.state[weight]["step"] == 4
    found = compact.decode_first(ours.state[weight]["exp_avg"], ours.state[weight]["exp_avg_scale"])
    given = theirs.state[weight]["exp_avg"]
    assert (found - given).abs().max() < 0.01 * given.abs().max()


@pytest.mark.parametrize("shape", [(3, 5), (40, 100)])
def test_states_of_bitsandbytes_go_both_ways(shape):
    parameter = nn.Parameter(torch.randn(shape))
    state = {"step": 3, "exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
    theirs = moments.as_bitsandbytes(state, parameter)
    assert theirs["state1"].dtype == torch.uint8 and len(theirs["qmap1"]) == 256
    back = moments.of_bitsandbytes(theirs, parameter)
    for name in ("exp_avg", "exp_avg_sq"):
        assert (back[name] - state[name]).abs().max() < 0.02 * state[name].abs().max()
    ours = Adam([parameter], moment_bits=8)
    group = {"params": [0], **{k: v for k, v in ours.param_groups[0].items() if k != "params"}}
    ours.load_state_dict({"state": {0: theirs}, "param_groups": [group]})
    found = moments.with_bits(ours.state[parameter], parameter, 32)
    assert (found["exp_avg"] - state["exp_avg"]).abs().max() < 0.03 * state["exp_avg"].abs().max()


def test_the_dynamic_table_is_that_of_the_paper():
    signed, unsigned = moments.dynamic_table(True), moments.dynamic_table(False)
    for table in (signed, unsigned):
        assert len(table) == 256 == len(table.unique()) and table.max() == 1 and 0 in table
    assert signed[0] == -signed[-2] and unsigned.min() == 0
    assert math.isclose(signed[signed > 0].min(), 0.55e-6, rel_tol=1e-4)


def test_clipping_in_the_backward_pass():
    """After the first pass a spike of one matrix is clipped in the pass that brings it."""
    model = net()
    optimizer = Adam(model.parameters(), lr=1e-3, moment_bits=8).step_in_backward()
    optimizer.backward.max_norm = 0.01
    data = batches(3)
    for x, y in data:
        (model(x) - y).square().mean().backward()
        norm = optimizer.clip_grad_norm(0.01)
        optimizer.step()
        optimizer.zero_grad()
    assert norm > 0.01 and optimizer.backward.factor() < 1
    squares = optimizer.backward.norm**2
    x, y = data[0]
    ((model(x) - y).square().mean() * 1e4).backward()
    assert optimizer.backward.norm**2 > 1e4 * squares
    largest = max(
        moments.with_bits(optimizer.state[one], one, 32)["exp_avg"].norm()
        for one in model.parameters()
        if one.dim() > 1
    )
    assert largest < 0.0102


def test_accumulated_gradients_step_once():
    model, other = net(codes=False), net(codes=False)
    optimizer = Adam(model.parameters(), lr=1e-2, moment_bits=8).step_in_backward()
    plain = Adam(other.parameters(), lr=1e-2, moment_bits=8)
    for one, how in ((model, optimizer), (other, plain)):
        torch.manual_seed(5)
        (x, y), (z, w) = batches(2)
        with how.accumulate():
            (one(x) - y).square().mean().backward()
        (one(z) - w).square().mean().backward()
        how.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_second_pass_before_the_step_is_refused():
    model = net()
    optimizer = Adam(model.parameters(), lr=1e-2, moment_bits=8).step_in_backward()
    model(torch.randn(4, 64)).square().mean().backward()
    assert optimizer.backward is not None
    with pytest.raises(RuntimeError, match=r"run all passes but the last under"):
        model(torch.randn(4, 64)).square().mean().backward()


def test_a_gradient_that_is_not_finite_changes_nothing_that_comes_after_it():
    model = net()
    optimizer = Adam(model.parameters(), lr=1e-2, moment_bits=8).step_in_backward()
    before = [one.detach().clone() for one in model.parameters()]
    hook = model[2].register_full_backward_hook(
        lambda module, inputs, outputs: (torch.full_like(inputs[0], torch.nan),)
    )
    model(torch.randn(4, 64)).square().mean().backward()
    with pytest.raises(
        FloatingPointError, match=r"1 matrices stepped .* it and 0 after it did not"
    ):
        optimizer.step()
    hook.remove()
    after = dict(zip(dict(model.named_parameters()), before, strict=True))
    assert torch.equal(model[0].weight.detach().clone(), after["0.weight"])
    assert torch.equal(model[0].bias.detach(), after["0.bias"])
    assert not torch.equal(model[2].weight.detach().clone(), after["2.weight"])
    optimizer.zero_grad()
    assert all(map(math.isfinite, train(model, optimizer, batches(2))))


def test_factors_come_too_late_for_steps_in_the_backward_pass():
    optimizer = Adam(net().parameters(), moment_bits=8).step_in_backward()
    with pytest.raises(RuntimeError, match="multiply the loss instead"):
        optimizer.multiply_grads(0.5)


def test_an_optimizer_that_is_gone_steps_nothing():
    model = net()
    Adam(model.parameters(), lr=1e-2, moment_bits=8).step_in_backward()
    before = model[0].weight.detach().clone()
    model(torch.randn(4, 64)).square().mean().backward()
    assert torch.equal(before, model[0].weight.detach().clone())
    assert model[0].weight.grad is not None


def test_a_copy_of_an_optimizer_has_its_bits():
    model = net()
    optimizer = Adam(model.parameters(), lr=1e-2, moment_bits=8)
    train(model, optimizer, batches(2))
    twin = copy.deepcopy(optimizer)
    assert twin.moment_bits == 8
    assert [one["exp_avg"].dtype for one in twin.state.values()] == [
        one["exp_avg"].dtype for one in optimizer.state.values()
    ]


@pytest.mark.parametrize("bits", [4, "8", None])
def test_other_bits_are_refused(bits):
    with pytest.raises(ValueError, match="moment_bits is .*; it must be 8 or 32"):
        Adam([nn.Parameter(torch.ones(2, 2))], moment_bits=bits)


def test_codes_of_another_shape_are_refused():
    parameter, other = nn.Parameter(torch.ones(4, 300)), nn.Parameter(torch.ones(5, 300))
    optimizers = [Adam([one], moment_bits=8) for one in (parameter, other)]
    parameter.grad = torch.ones(4, 300)
    optimizers[0].step()
    with pytest.raises(ValueError, match=r"exp_avg of a parameter \(5, 300\) is \(4, 300\)"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())


def test_kernels_of_more_dimensions_have_moments_of_eight_bits():
    model = nn.Conv1d(6, 10, 3)
    optimizer = Adam(model.parameters(), lr=1e-2, moment_bits=8)
    model(torch.randn(2, 6, 9)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].shape == (10, 18)
    torch.testing.assert_close(
        before - model.weight, 0.01 * model.weight.grad.sign(), rtol=0.02, atol=1e-4
    )


def test_matrices_without_gradients_are_forgotten_by_the_norm():
    model = net()
    optimizer = Adam(model.parameters(), lr=1e-3, moment_bits=8).step_in_backward()
    x, y = batches(1)[0]
    ((model(x) - y).square().mean() * 1e3).backward()
    optimizer.step()
    model[0].requires_grad_(False)
    (model(x) - y).square().mean().backward()
    alone = optimizer.state[model[2].weight]["square"]
    optimizer.step()
    assert optimizer.backward.norm == pytest.approx(alone**0.5)


def test_the_newest_optimizer_steps_in_the_backward_pass():
    model = net()
    first = Adam(model.parameters(), lr=0.1, moment_bits=8).step_in_backward()
    second = Adam(model.parameters(), lr=0.0)
    before = model[0].weight.detach().clone()
    train(model, second, batches(1))
    assert (model[0].weight.detach().clone() - before).abs().max() < 1e-4
    assert not first.state


def test_clipped_steps_in_the_backward_pass_go_on_bit_by_bit(tmp_path):
    def steps(model, optimizer, data):
        torch.manual_seed(7)
        for x, y in data:
            (model(x) - y).square().mean().backward()
            optimizer.clip_grad_norm(0.05)
            optimizer.step()
            optimizer.zero_grad()

    model = net()
    optimizer = Adam(model.parameters(), lr=1e-2, moment_bits=8).step_in_backward()
    steps(model, optimizer, batches(4))
    other = net(seed=9)
    again = Adam(other.parameters(), lr=1.0, moment_bits=8).step_in_backward()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert again.backward.max_norm == 0.05 and again.backward.norm == optimizer.backward.norm
    for one, how in ((model, optimizer), (other, again)):
        steps(one, how, batches(4, seed=2))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.detach().clone(), two.detach().clone())


def test_a_vector_whose_gradient_is_not_finite_is_an_error():
    model = net()
    optimizer = Adam(model.parameters(), lr=1e-2, moment_bits=8).step_in_backward()
    model(torch.randn(4, 64)).square().mean().backward()
    before = model[0].bias.detach().clone()
    model[2].bias.grad[3] = torch.nan
    with pytest.raises(FloatingPointError, match="2 matrices stepped .* vectors did not"):
        optimizer.step()
    assert torch.equal(before, model[0].bias.detach())


def test_a_pass_that_failed_does_not_block_the_next():
    model = net()
    optimizer = Adam(model.parameters(), lr=1e-2, moment_bits=8).step_in_backward()
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.zero_grad()
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
