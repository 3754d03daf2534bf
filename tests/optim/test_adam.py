"""lsq.optim.Adam against torch.optim's and fairseq's: steps, states, options."""

import copy
import math

import pytest
import torch
from fairseq.optim.adam import Adam as FairseqAdam
from fairseq.utils import clip_grad_norm_

from lsq.optim import Adam
from lsq.run.backends import backend

OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-6}


def pair():
    """Two equal modules."""
    first = torch.nn.Sequential(
        torch.nn.Linear(33, 17), torch.nn.LayerNorm(17), torch.nn.Linear(17, 1, bias=False)
    )
    return first, copy.deepcopy(first)


def train(modules, optimizers, steps=8, between=lambda optimizer: None):
    for _ in range(steps):
        x = torch.randn(5, 33)
        for module, optimizer in zip(modules, optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            between(optimizer)
            optimizer.step()


def assert_same(modules, tolerance=2e-6):
    for ours, theirs in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def others(module, decay=0.0, **options):
    return {
        "fairseq": lambda: FairseqAdam(module.parameters(), **OPTIONS, weight_decay=decay),
        "torch": lambda: torch.optim.AdamW(module.parameters(), **OPTIONS, weight_decay=decay),
    }


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("like", ["fairseq", "torch"])
def test_steps_are_those_of_other_libraries(like, decay):
    ours, theirs = pair()
    epsilon = {"torch_epsilon": like == "torch"}
    optimizer = Adam(ours.parameters(), **OPTIONS, weight_decay=decay, **epsilon)
    train((ours, theirs), (optimizer, others(theirs, decay)[like]()))
    assert_same((ours, theirs))


def test_groups_have_options_of_their_own_and_schedulers_change_the_rate():
    ours, theirs = pair()

    def groups(module):
        first, *rest = module
        others = [parameter for one in rest for parameter in one.parameters()]
        return [{"params": first.parameters(), "lr": 1e-2}, {"params": others, "eps": 0.1}]

    mine = Adam(groups(ours), **OPTIONS)
    optimizers = mine, torch.optim.AdamW(groups(theirs), **OPTIONS, weight_decay=0)
    schedules = {one: torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in optimizers}
    train((ours, theirs), optimizers, between=lambda optimizer: schedules[optimizer].step())
    assert_same((ours, theirs))


def test_parameters_without_gradients_keep_their_step():
    ours, theirs = pair()
    optimizers = Adam(ours.parameters(), **OPTIONS), others(theirs)["torch"]()

    def freeze_sometimes(optimizer):
        last = optimizer.param_groups[0]["params"][-1]
        if not last.requires_grad or optimizer.state[last].get("step", 0) == 2:
            last.requires_grad_(not last.requires_grad)
            last.grad = None

    train((ours, theirs), optimizers, between=freeze_sometimes)
    assert_same((ours, theirs))
    steps = [optimizers[0].state[parameter]["step"] for parameter in ours.parameters()]
    last = optimizers[1].state[list(theirs.parameters())[-1]]["step"]
    assert steps == [8, 8, 8, 8, last] and last < 8


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
def test_gradients_are_multiplied_and_clipped_in_the_step(max_norm):
    ours, theirs = pair()
    norms = []

    def clip(optimizer):
        if isinstance(optimizer, Adam):
            before = [parameter.grad.clone() for parameter in ours.parameters()]
            optimizer.multiply_grads(0.25)
            norms.append(optimizer.clip_grad_norm(max_norm))
            assert all(map(torch.equal, before, (one.grad for one in ours.parameters())))
        else:
            for parameter in theirs.parameters():
                parameter.grad.mul_(0.25)
            norms.append(clip_grad_norm_(theirs.parameters(), max_norm))

    optimizers = Adam(ours.parameters(), **OPTIONS), others(theirs)["torch"]()
    train((ours, theirs), optimizers, between=clip)
    assert_same((ours, theirs))
    torch.testing.assert_close(torch.stack(norms[0::2]), torch.stack(norms[1::2]))


def test_a_factor_does_not_outlive_its_gradients():
    module, _ = pair()
    optimizer = Adam(module.parameters(), **OPTIONS)
    optimizer.multiply_grads(math.nan)
    train((module,), (optimizer,), steps=1)
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_the_norm_does_not_depend_on_threads():
    module = torch.nn.Linear(3, 300001, bias=False)
    module.weight.grad = torch.randn(module.weight.shape)
    optimizer, found, threads = Adam(module.parameters()), [], torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(optimizer.clip_grad_norm(0.0))
    torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]
    expected = module.weight.grad.double().norm().float()
    torch.testing.assert_close(found[0], expected, rtol=2e-7, atol=0)
    assert Adam(torch.nn.Linear(3, 3).parameters()).clip_grad_norm(1.0) == 0


@pytest.mark.parametrize("like", ["fairseq", "torch"])
@pytest.mark.parametrize("theirs_first", [False, True])
def test_states_go_both_ways(like, theirs_first):
    ours, theirs = pair()
    optimizers = (
        Adam(ours.parameters(), **OPTIONS, torch_epsilon=like == "torch"),
        others(theirs)[like](),
    )
    first, second = (1, 0) if theirs_first else (0, 1)
    modules = ours, theirs
    train((modules[first],), (optimizers[first],))
    modules[second].load_state_dict(modules[first].state_dict())
    optimizers[second].load_state_dict(copy.deepcopy(optimizers[first].state_dict()))
    train(modules, optimizers)
    assert_same(modules)


def test_a_state_repeats_a_run(tmp_path):
    ours, again = pair()
    optimizer = Adam(ours.parameters(), **OPTIONS)
    train((ours,), (optimizer,))
    torch.save((ours.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    again.load_state_dict(weights)
    other = Adam(again.parameters(), lr=7.0)
    other.load_state_dict(state)
    train((ours, again), (optimizer, other))
    assert all(map(torch.equal, ours.parameters(), again.parameters()))


def test_a_copy_goes_on_alone():
    ours, _ = pair()
    optimizer = Adam(ours.parameters(), **OPTIONS, torch_epsilon=False)
    train((ours,), (optimizer,))
    both = copy.deepcopy([ours, optimizer])
    before = [parameter.clone() for parameter in ours.parameters()]
    train(both[:1], both[1:])
    assert all(map(torch.equal, before, ours.parameters()))
    assert not any(map(torch.equal, before, both[0].parameters()))
    assert both[1].param_groups[0]["torch_epsilon"] is False


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": torch.tensor(0.1)}, "lr is tensor"),
        ({"eps": math.nan}, "eps is nan"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\)"),
        ({"weight_decay": math.inf}, "weight_decay is inf"),
    ],
)
def test_options_out_of_range_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        Adam(torch.nn.Linear(3, 3).parameters(), **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_refused(dtype):
    optimizer = Adam(torch.nn.Linear(3, 3).parameters())
    with pytest.raises(
        ValueError, match=r"a parameter \(3, 3\) is torch.*takes contiguous float32"
    ):
        optimizer.add_param_group({"params": torch.nn.Linear(3, 3).to(dtype).parameters()})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=r"with strides \(1, 5\)"):
        Adam([torch.nn.Parameter(torch.zeros(4, 5).t())])


@pytest.mark.parametrize(
    ("make", "options", "named"),
    [
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad"),
        (torch.optim.Adam, {"maximize": True}, "maximize is"),
        (torch.optim.Adam, {"weight_decay": 0.1}, "not decoupled"),
        (
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9},
            "has momentum_buffer, but no step: of no Adam",
        ),
    ],
)
def test_states_of_another_kind_are_refused_and_nothing_is_loaded(make, options, named):
    ours, theirs = pair()
    optimizer, other = Adam(ours.parameters(), **OPTIONS), make(theirs.parameters(), **options)
    train((ours, theirs), (optimizer, other), steps=2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=named):
        optimizer.load_state_dict(other.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, state in before["state"].items():
        assert after["state"][number]["step"] == 2
        assert torch.equal(after["state"][number]["exp_avg"], state["exp_avg"])


def with_gradients(*shapes):
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def test_states_of_other_shapes_are_refused():
    optimizer, other = Adam(with_gradients([4], [100, 3])), Adam(with_gradients([100, 3], [4]))
    other.step()
    with pytest.raises(
        ValueError, match=r"state exp_avg of a parameter \(4,\) on cpu is \(100, 3\)"
    ):
        optimizer.load_state_dict(other.state_dict())
    optimizer.step()


@pytest.mark.parametrize("shape", [[400, 3], [1]])
def test_parameters_whose_shape_changes_are_refused(shape):
    (parameter,) = with_gradients([4, 3])
    optimizer = Adam([parameter])
    optimizer.step()
    parameter.data = torch.ones(shape)
    with pytest.raises(ValueError, match=r"on cpu is \(4, 3\)"):
        optimizer.step()
    parameter.grad = torch.ones(shape)
    with pytest.raises(ValueError, match=r"state exp_avg .* on cpu is \(4, 3\)"):
        optimizer.step()


def test_moments_on_another_device_are_refused():
    (parameter,) = with_gradients([4, 3])
    optimizer = Adam([parameter])
    optimizer.step()
    optimizer.state[parameter]["exp_avg_sq"] = torch.zeros(4, 3, device="meta")
    with pytest.raises(
        ValueError, match=r"state exp_avg_sq of a parameter \(4, 3\) on cpu is \(4, 3\) on meta"
    ):
        optimizer.step()


def test_another_parameter_on_the_same_memory_is_stepped_and_counted():
    (parameter,) = with_gradients([4])
    optimizer = Adam([parameter])
    optimizer.step()
    other = torch.nn.Parameter(parameter.data)
    other.grad, version = parameter.grad, other._version
    optimizer.param_groups[0]["params"] = [other]
    optimizer.state[other] = optimizer.state.pop(parameter)
    optimizer.step()
    assert other._version > version and optimizer.state[other]["step"] == 2


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = Adam(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="a gradient is sparse"):
        optimizer.step()


def test_a_closure_gives_the_gradients():
    module, _ = pair()
    optimizer, before = Adam(module.parameters(), **OPTIONS), module[0].weight.clone()

    def loss():
        optimizer.zero_grad()
        found = module(torch.ones(2, 33)).sum()
        found.backward()
        return found

    assert optimizer.step(loss).requires_grad and not torch.equal(before, module[0].weight)


def test_without_a_library_the_reference_steps():
    parameter = torch.nn.Parameter(torch.randn(5, 3))
    other = torch.nn.Parameter(parameter.detach().clone())
    optimizers = Adam([parameter], backend=backend("reference")), Adam([other])
    for one, optimizer in zip((parameter, other), optimizers, strict=True):
        one.grad = torch.ones_like(one)
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
    assert torch.equal(parameter, other)
