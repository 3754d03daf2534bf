"""Parameters that train as codes: reading, writing, gradients, copies and files."""

import copy
import io

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

import lsq
from lsq.layers.trained_codes import TrainedCodes
from lsq.quant import compact


def net(remainder: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    made = nn.Sequential(nn.Embedding(30, 64), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    lsq.convert(made)
    lsq.train_codes(made, remainder=remainder)
    return made


@pytest.mark.parametrize("remainder", [False, True])
def test_reading_gives_codes_and_remainders(remainder):
    weight = net(remainder)[1].weight
    codes, parts, scale = weight.own
    whole = codes.double() + (parts.double() / 254 if remainder else 0)
    torch.testing.assert_close(
        weight.double(), whole * scale[:, None].double(), rtol=1e-6, atol=1e-9
    )
    assert (parts is not None) == remainder and weight.shape == (96, 64)


@pytest.mark.parametrize("remainder", [False, True])
def test_products_read_codes(remainder):
    made, words = net(remainder), torch.randint(30, (7,))
    codes, _, scale = made[1].weight.own
    floats = nn.Sequential(nn.Embedding(30, 64), nn.Linear(64, 96))
    with torch.no_grad():
        floats[0].weight.copy_(made[0].weight.detach())
        floats[1].weight.copy_(codes * scale[:, None])
        floats[1].bias.copy_(made[1].bias)
    made.eval()
    found, wanted = made[:2](words), floats(words)
    assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()  # inputs are rounded


def test_gradients_are_those_of_float_weights():
    made = net()
    plain = nn.Sequential(nn.Embedding(30, 64), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    with torch.no_grad():
        for ours, theirs in zip(made, plain, strict=True):
            for name, one in theirs.named_parameters():
                one.copy_(dict(ours.named_parameters())[name].detach())
    lsq.convert(plain)
    words = torch.randint(30, (64,))
    for model in (made, plain):
        torch.manual_seed(5)
        model(words).square().sum().backward()
    for name, theirs in plain.named_parameters():
        if theirs.grad is not None:
            ours = dict(made.named_parameters())[name].grad
            assert type(ours) is torch.Tensor
            # a code on the border of two may differ by one
            assert (ours - theirs.grad).abs().max() < 0.005 * theirs.grad.abs().max()


def test_copy_rounds_to_the_nearest_codes():
    weight, values = net()[1].weight, torch.randn(96, 64)
    with torch.no_grad():
        weight.copy_(values)
    step = values.abs().amax(1, keepdim=True) / 127 / compact.PARTS
    assert ((weight - values).abs() <= 0.51 * step).all()


@pytest.mark.parametrize(
    "write",
    [
        lambda one: one.mul_(2),
        lambda one: one.__setitem__(0, 1.0),
        lambda one: setattr(one, "data", torch.ones(96, 64)),
        lambda one: one.view(-1).zero_(),
    ],
)
def test_other_writes_are_refused(write):
    weight = net()[1].weight
    before = weight.clone()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"lsq\.train_codes keeps"):
        write(weight)
    assert torch.equal(weight.clone(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_of_a_model_keep_the_codes(dtype):
    made, words = net().eval(), torch.randint(30, (7,))
    wanted = made(words)
    weights = [made[number].weight for number in (0, 1, 3)]
    before = [part.clone() for weight in weights for part in weight.own]
    made.to(dtype)
    found = made(words)
    assert found.dtype == dtype and {one.dtype for one in weights} == {dtype}
    assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()
    made.float()
    assert [made[number].weight for number in (0, 1, 3)] == weights
    assert all(map(torch.equal, before, [part for weight in weights for part in weight.own]))


@pytest.mark.parametrize(
    "change", [lambda cast, weight: cast.mul_(2), lambda cast, weight: weight.copy_(cast * 2)]
)
def test_what_has_changed_since_is_no_cast(change):
    weight = net()[1].weight
    with torch.no_grad():
        cast = weight.bfloat16()
        change(cast, weight)
        with pytest.raises(RuntimeError, match=r"\.data cannot be set"):
            weight.data = cast
    assert weight.dtype == torch.float32


def test_other_devices_and_shared_memory_are_refused():
    with pytest.raises(RuntimeError, match=r"cannot go to meta: lsq\.train_codes"):
        net().to("meta")
    with pytest.raises(RuntimeError, match=r"no address of floats: lsq\.train_codes"):
        net().share_memory()


def test_views_of_rows_share_the_codes_and_others_are_decoded():
    weight = net()[1].weight
    values = weight.detach().clone()
    for rows in (slice(3, 50), slice(90, None), slice(-6, None), slice(5, 2)):
        assert isinstance(weight[rows], TrainedCodes)
        assert torch.equal(weight[rows].clone(), values[rows])
    for part, wanted in zip(weight.chunk(7), values.chunk(7), strict=True):
        assert isinstance(part, TrainedCodes) and torch.equal(part.clone(), wanted)
    for view in (
        lambda one: one[3:50:2],
        lambda one: one[:, 2:5],
        lambda one: one.chunk(2, 1)[1],
        lambda one: one.view(-1),
        lambda one: one.view(-1)[7:9],
        lambda one: one.view(64, 96),
        lambda one: one.as_strided((64, 96), (1, 64)),
    ):
        assert torch.equal(view(weight).clone(), view(values))
    for zeros in (weight.new_zeros(3, 5), weight.new_zeros(3, 64, dtype=torch.int64)):
        assert type(zeros) is torch.Tensor
    with torch.no_grad():
        weight[3:5].copy_(values[:2])
    values[3:5] = values[:2]
    assert torch.equal(weight.detach().clone(), values)


def test_another_optimizer_is_refused():
    made = net()
    made(torch.randint(30, (5,))).sum().backward()
    with pytest.raises(RuntimeError, match=r"lsq\.optim\.Adam and copy_ change it"):
        torch.optim.SGD(made.parameters(), 0.1).step()


def test_a_deep_copy_has_codes_of_its_own():
    made = net()
    twin = copy.deepcopy(made)
    assert isinstance(twin[1].weight, TrainedCodes)
    with torch.no_grad():
        twin[1].weight.copy_(torch.zeros(96, 64))
    assert made[1].weight.clone().any() and not twin[1].weight.clone().any()


def test_files_hold_floats_from_which_the_same_codes_come_back():
    made, file = net(), io.BytesIO()
    made(torch.randint(30, (9,)))
    torch.save(made.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(type(one) is torch.Tensor for one in state.values() if torch.is_tensor(one))
    other = net()
    with torch.no_grad():
        other[1].weight.copy_(torch.randn(96, 64))
    other.load_state_dict(state)
    for name in (0, 1, 3):
        for one, two in zip(made[name].weight.own, other[name].weight.own, strict=True):
            assert torch.equal(one, two)


def test_clips_of_state_dicts_are_those_of_the_codes():
    made = net()
    made(torch.randint(30, (9,)))
    with torch.no_grad():
        made[1].weight.copy_(torch.randn(96, 64))
    clip = made.state_dict()["1.weight_clip"]
    assert torch.equal(clip, made[1].weight.detach().clone().abs().amax(1))


def test_an_embedding_reads_only_the_rows_that_it_needs():
    made, words = net(), torch.randint(30, (4, 3))
    wanted = made[0].weight.detach().clone()[words]
    assert torch.equal(made[0](words), wanted)


def test_safetensors_saves_floats_or_nothing(tmp_path):
    made = net()
    with pytest.raises(ValueError, match="non contiguous"):
        save_file(made.state_dict(), tmp_path / "wrong")
    state = {name: one.contiguous() for name, one in made.state_dict().items()}
    save_file(state, tmp_path / "right")
    weight = load_file(tmp_path / "right")["1.weight"]
    assert torch.equal(weight, made[1].weight.detach().clone())


def test_safetensors_saves_and_loads_whole_models(tmp_path):
    made, other = net(), net()
    with torch.no_grad():
        other[1].weight.copy_(torch.randn(96, 64))
    save_model(made, str(tmp_path / "model"))
    load_model(other, tmp_path / "model")
    for one, two in zip(made[1].weight.own, other[1].weight.own, strict=True):
        assert torch.equal(one, two)


def test_a_pickled_model_trains_as_floats(tmp_path):
    made = net()
    torch.save(made, tmp_path / "model")
    again = torch.load(tmp_path / "model", weights_only=False)
    assert type(again[1].weight) is nn.Parameter and again[1].weight.requires_grad
    assert torch.equal(again[1].weight.detach(), made[1].weight.detach().clone())


def test_a_backward_pass_through_changed_codes_is_an_error():
    made = net()
    loss = made(torch.randint(30, (5,))).square().sum()
    with torch.no_grad():
        made[3].weight.copy_(torch.randn(64, 96))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_words_that_no_embedding_has_are_an_error():
    made = net()
    for word in (-1, 30):
        with pytest.raises(IndexError):
            made[0](torch.tensor([word]))
