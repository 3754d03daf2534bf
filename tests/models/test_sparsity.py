"""Sparse models: what they compute against dense ones whose weights have zeros, and how their masks
go on."""

import copy
import io
import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn

import lsq
from lsq.config import QuantConfig
from lsq.layers import QuantizedLinear, TransformerEncoderLayer, VocabularyProjection
from lsq.models.sparsity import (
    Packed,
    Pruning,
    check_width,
    choose,
    pack,
    product,
    sparsify,
    unpack,
)
from lsq.optim import Adam
from tests.constants import quant_with
from tests.layers.shapes import HIDDEN, config_of
from tests.models import models

INPUTS, OUTPUTS = 48, 32
QUANT = quant_with(backward="float", calibration_passes=0)


def layer(seed: int = 1, quant: QuantConfig = QUANT) -> QuantizedLinear:
    torch.manual_seed(seed)
    return QuantizedLinear(INPUTS, OUTPUTS, quant=quant)


def batch(seed: int = 2, rows: int = 13) -> torch.Tensor:
    return torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(seed))


def pruned(module: nn.Module, *, keep: int = 2) -> nn.Module:
    """A copy of dense lsq layers whose weights have zeros, found by sorting."""
    module = copy.deepcopy(module)
    with torch.no_grad():
        for name, one in module.named_parameters():
            if name.endswith("weight") and one.dim() == 2:
                order = one.abs().unflatten(1, (-1, 4)).argsort(dim=2, descending=True)
                one.unflatten(1, (-1, 4)).scatter_(2, order[:, :, keep:], 0.0)
    return module


def train(model: nn.Module, optimizer, steps: int, seed: int = 0) -> list[float]:
    losses = []
    for step in range(steps):
        x = batch(seed + step)
        loss = (model(x) - x[:, :OUTPUTS]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# What it computes


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "float"},
        {},
        {"weight_granularity": "tensor"},
        {"bits": 4},
        {"weight_format": "int4"},
        {"clip_gradient": "lsq"},
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_equals_a_dense_layer_with_zeros(options, training):
    sparse = layer(quant=quant_with(backward="float", calibration_passes=0, **options)).train(
        training
    )
    dense, x = pruned(sparse), batch()
    with torch.no_grad():
        dense.weight[3, 5] = sparse.weight[3, 5] = float("nan")
    sparsify(sparse)
    torch.testing.assert_close(sparse(x), dense(x), rtol=0, atol=0, equal_nan=True)
    assert sparse(x).isnan().any()


@pytest.mark.parametrize("every", [0, 1])
def test_gradients(every):
    """Those of the dense layer, for all of a weight or for what is kept."""
    sparse, x = layer(), batch()
    dense = pruned(sparse)
    sparsify(sparse, Pruning(every=every))
    for one in (sparse, dense):
        one(x).square().sum().backward()
    expected = dense.weight.grad if every else dense.weight.grad * (dense.weight != 0)
    assert torch.equal(sparse.weight.grad, expected)
    assert torch.equal(sparse.weight_clip.grad, dense.weight_clip.grad)
    assert torch.equal(sparse.bias.grad, dense.bias.grad)


@pytest.mark.parametrize("mode", ["int8", "float"])
def test_all_weights_of_an_encoder_layer(mode):
    torch.manual_seed(1)
    dense = TransformerEncoderLayer(config_of(mode=mode, calibration_passes=0))
    sparse, dense = dense, pruned(dense)
    found = sparsify(sparse)
    assert list(found.weights) == [
        "self_attn.qkv_weight",
        "self_attn.out_weight",
        "feed_forward.fc1_weight",
        "feed_forward.fc2_weight",
    ]
    x = torch.randn(5, 3, HIDDEN)
    assert torch.equal(sparse(x), dense(x))
    found.finish()
    assert torch.equal(sparse(x), dense(x))
    assert sparse.state_dict().keys() == dense.state_dict().keys()


def test_by_output():
    """Of inputs of different sizes, the weights of the smallest are pruned; the error of the output
    is less."""
    plain, x = layer(quant=QuantConfig(mode="float")), batch(rows=500)
    x = x * torch.tensor([0.01, 3.0, 1.0, 0.3]).repeat(INPUTS // 4)
    wanted, errors = plain(x), {}
    for measure in ("magnitude", "output"):
        one = copy.deepcopy(plain)
        run = partial(one, x) if measure == "output" else None
        sparsify(one, Pruning(measure=measure), run=run)
        errors[measure] = (one(x) - wanted).square().sum()
        scores = plain.weight.abs() if run is None else plain.weight.square() * x.square().mean(0)
        assert torch.equal(one.weight_masks.mask(one, "weight"), choose(scores))
    assert errors["output"] < 0.9 * errors["magnitude"]


# Over a training


@pytest.mark.parametrize("make", [Adam, torch.optim.AdamW, torch.optim.SGD])
def test_fixed_masks(make):
    model = layer()
    sparsity = sparsify(model, Pruning(every=0))
    optimizer = make(model.parameters(), lr=0.01, weight_decay=0.0)
    sparsity.follow(optimizer)
    mask, before = model.weight_masks.mask(model, "weight"), model.weight.detach().clone()
    losses = train(model, optimizer, 20)
    assert losses[-1] < losses[0]
    assert torch.equal(model.weight[~mask], before[~mask]) and not torch.equal(
        model.weight[mask], before[mask]
    )
    assert torch.equal(model.weight_masks.mask(model, "weight"), mask) and sparsity.updates == 20
    sparsity.finish()
    assert torch.equal(model.weight != 0, mask)
    train(model, optimizer, 1)
    assert sparsity.updates == 20


def test_equal_steps_of_both_optimizers():
    """lsq's Adam writes codes of new weights, and multiplies gradients later than the decay is
    added."""
    found = []
    for make in (Adam, torch.optim.AdamW):
        model = layer()
        optimizer = make(model.parameters(), lr=0.01, weight_decay=0.0)
        train(model, optimizer, 2)
        sparsify(model, Pruning(every=2, decay=0.1)).follow(optimizer)
        for step in range(4):
            x = batch(step)
            (model(x) - x[:, :OUTPUTS]).square().mean().backward()
            if isinstance(optimizer, Adam):
                optimizer.multiply_grads(torch.tensor(0.25))
            else:
                for one in model.parameters():
                    one.grad *= 0.25
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.weight.detach())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_decay_is_of_what_is_pruned():
    model = layer()
    sparsity = sparsify(model, Pruning(every=100, decay=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsity.follow(optimizer)
    mask, before = model.weight_masks.mask(model, "weight"), model.weight.detach().clone()
    model.weight.grad = torch.full_like(model.weight, 0.3)
    share = 0.5 * model.weight.grad.norm() / before.norm()
    optimizer.step()
    drawn = before - 0.1 * (0.3 + share * before)
    torch.testing.assert_close(
        model.weight, torch.where(mask, before - 0.03, drawn), rtol=0, atol=1e-6
    )


def test_decay_of_nothing():
    """Weights of zeros, and gradients of zeros, are drawn nowhere."""
    model = layer()
    torch.nn.init.zeros_(model.weight)
    sparsity = sparsify(model)
    model.weight.grad = torch.ones_like(model.weight)
    sparsity.draw()
    assert (model.weight.grad == 1).all()


def test_masks_follow_the_weights():
    model = layer()
    sparsity = sparsify(model, Pruning(every=2))
    before = model.weight_masks.mask(model, "weight")
    x = batch()
    model.eval()(x)
    with torch.no_grad():
        model.weight[:, ::4], model.weight[:, 1::4] = 0.0, 0.0
    sparsity.step()
    assert torch.equal(model.weight_masks.mask(model, "weight"), before)
    sparsity.step()
    now = model.weight_masks.mask(model, "weight")
    assert not now[:, ::4].any() and not now[:, 1::4].any()
    assert (
        sparsity.changed == pytest.approx((now != before).float().mean().item())
        and sparsity.changed > 0
    )
    assert torch.equal(model(x), pruned(strip(model)).eval()(x))


def strip(model: nn.Module) -> nn.Module:
    """A dense layer with the state of a sparse one."""
    dense = layer(quant=model.quant)
    dense.load_state_dict(
        {name: one for name, one in model.state_dict().items() if not name.endswith("_kept")}
    )
    return dense


def test_dense_at_first_and_at_the_end():
    model, x = layer(), batch()
    dense = copy.deepcopy(model)
    model.eval()
    sparsity = sparsify(model, Pruning(begin=1, end=3))
    assert "dense after 0 updates" in repr(sparsity)
    assert torch.equal(model(x), dense.eval()(x))
    sparsity.step()
    sparse = model(x)
    assert torch.equal(sparse, pruned(dense).eval()(x)) and torch.equal(model.weight, dense.weight)
    sparsity.step()
    sparsity.step()
    assert torch.equal(model(x), sparse) and torch.equal(model.weight, pruned(dense).weight)
    assert "dense after 3 updates" in repr(sparsity)
    model.train()(x).sum().backward()
    assert model.weight.grad[model.weight == 0].all()


def test_goes_on_from_a_checkpoint():
    """As if it had not been interrupted, under Adam and with masks by output."""
    pruning, run = Pruning(every=3, measure="output", begin=1), {}

    def made(seed):
        model = layer(seed)
        run["model"] = model
        sparsity = sparsify(model, pruning, run=lambda: model(batch(9)))
        optimizer = Adam(model.parameters(), lr=0.01)
        sparsity.follow(optimizer)
        return model, sparsity, optimizer

    parts = made(1)
    train(parts[0], parts[2], 5)
    file = io.BytesIO()
    torch.save([one.state_dict() for one in parts], file)
    expected = train(parts[0], parts[2], 6, seed=5)
    others = made(4)
    for one, state in zip(
        others, torch.load(io.BytesIO(file.getvalue()), weights_only=True), strict=True
    ):
        one.load_state_dict(state)
    assert train(others[0], others[2], 6, seed=5) == expected
    assert others[1].updates == 11


def test_a_copy_is_of_its_own():
    model, x = layer(), batch()
    sparsity = sparsify(model)
    twin, expected = copy.deepcopy(model), model(x)
    sparsity.finish()
    assert torch.equal(twin(x), expected) and "weight_kept" in twin.state_dict()


# Models of others


@pytest.fixture
def converted() -> nn.Module:
    model = models.model()
    lsq.convert(model, QUANT)
    return model


def test_converted_models(converted):
    tokens = models.tokens()
    converted(tokens)
    found = sparsify(converted, skip="blocks.1.up")
    assert set(found.weights) == {
        f"blocks.{path}.weight" for path in ("0.up", "0.mix", "0.down", "1.mix", "1.down")
    }
    mix = converted.blocks[0].mix
    assert torch.equal(mix.weight_masks.mask(mix, "weight").t(), choose(mix.weight.t().abs()))
    names = lsq.models.float_state_dict(converted).keys()
    assert names == models.model().state_dict().keys()
    models.loss_of(converted(tokens)).backward()
    sparse = converted.eval()(tokens)
    found.finish()
    assert torch.equal(converted(tokens), sparse)


def test_revert_leaves_zeros(converted):
    sparsify(converted)
    lsq.revert(converted)
    assert converted.state_dict().keys() == models.model().state_dict().keys()
    assert (converted.blocks[0].up.weight == 0).float().mean() == 0.5


# Refused


def test_widths():
    quant = QuantConfig(mode="float")
    model = nn.Sequential(QuantizedLinear(8, 6, quant=quant), QuantizedLinear(6, 2, quant=quant))
    with pytest.raises(ValueError, match=r"1.weight has 6 inputs, .* use 8"):
        sparsify(model)
    assert "0.weight_kept" not in model.state_dict()
    assert list(sparsify(model, skip="1").weights) == ["0.weight"]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            lambda: nn.Linear(16, 16),
            {},
            r"Linear has no weight to prune; none of its layers is lsq's: call lsq.convert",
        ),
        (
            lambda: VocabularyProjection(16, 16),
            {},
            r"no weight to prune; its layers of lsq are projections onto a voc",
        ),
        (
            lambda: QuantizedLinear(16, 16),
            {"skip": "weight"},
            r"no weight to prune; skip leaves none of 1: skip less",
        ),
        (layer, {"skip": "wieght"}, r"skip names 'wieght', .* near are weight"),
        (
            layer,
            {"pruning": Pruning(measure="output")},
            r"measure is 'output' and run is None; give run=",
        ),
        (layer, {"run": lambda: None}, r"measure is 'magnitude' and run is <function"),
        (
            layer,
            {"pruning": Pruning(measure="output"), "run": lambda: None},
            r"weight was not used in this batch",
        ),
        (lambda: layer().to("meta"), {}, r"weight is on the meta device"),
    ],
)
def test_refused(make, options, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        sparsify(model, options.pop("pruning", None), **options)
    assert not any(name.endswith("_kept") for name in model.state_dict())


def test_what_there_is_is_named():
    with pytest.raises(TypeError, match="model is 'model.pt', a str; give a torch.nn.Module"):
        sparsify("model.pt")
    with pytest.raises(
        ValueError, match="skip names 'zzz', but no module .* is called so; there are weight"
    ):
        sparsify(layer(), skip="zzz")


def test_sparse_already():
    model = layer()
    sparsify(model)
    with pytest.raises(
        ValueError, match=r"weight is sparse already; call finish\(\) of its Sparsity"
    ):
        sparsify(model)


def test_finished_and_sparse_again():
    model = layer()
    sparsify(model).finish()
    before = model.weight.detach().clone()
    sparsify(model).finish()
    assert torch.equal(model.weight, before)


def test_state_of_another_measure():
    sparsity = sparsify(layer())
    with pytest.raises(
        ValueError, match=r"other weights or another measure: weight is in one of both alone"
    ):
        sparsity.load_state_dict({"updates": 3, "squares": {"weight": torch.ones(INPUTS)}})
    assert sparsity.updates == 0


def test_a_parameter_of_two_layers_has_one_mask():
    torch.manual_seed(0)
    first, second = layers = torch.nn.Sequential(QuantizedLinear(32, 32), QuantizedLinear(32, 32))
    second.weight = first.weight
    x = torch.randn(9, 32) * torch.linspace(0.1, 3, 32)
    sparsity = sparsify(layers, Pruning(measure="output"), run=lambda: layers(x))
    masks = [one.weight_masks.mask(one, "weight") for one in layers]
    assert masks[0].equal(masks[1])
    sparsity.finish()
    assert (first.weight != 0).float().mean() == 0.5


def test_two_optimizers_do_not_count_twice():
    layers = torch.nn.Sequential(QuantizedLinear(32, 32), QuantizedLinear(32, 32))
    sparsity = sparsify(layers)
    first, second = (torch.optim.SGD(one.parameters(), lr=0.1) for one in layers)
    sparsity.follow(first)
    with pytest.raises(ValueError, match="updates would count twice"):
        sparsity.follow(second)
    sparsity.leave()
    sparsity.follow(second)
    second.step()
    assert sparsity.updates == 1


def sparse_codes(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    """int8 codes, also with groups of fewer than two values."""
    codes = torch.randint(
        -127, 128, (rows, columns), generator=torch.Generator().manual_seed(seed)
    ).to(torch.int8)
    codes = codes * choose(codes.int().abs())
    codes[:, ::3] = 0
    return codes


@pytest.mark.parametrize("shape", [(1, 4), (5, 8), (3, 12), (17, 44), (0, 16)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.bfloat16])
def test_comes_back(shape, dtype):
    matrix = sparse_codes(*shape).to(dtype)
    packed = pack(matrix)
    assert packed.values.shape == (shape[0], shape[1] // 2) and packed.values.dtype == dtype
    assert (
        packed.indices.shape == (shape[0], -(-shape[1] // 8))
        and packed.indices.dtype == torch.uint8
    )
    assert torch.equal(unpack(packed), matrix)


def test_where_indices_lie():
    """The example of two groups: values at 1 and 3, and at 0 and 2, in one byte from its lowest
    bits on."""
    packed = pack(torch.tensor([[0, 5, 0, -6, 7, 0, 8, 0]], dtype=torch.int8))
    assert packed.values.tolist() == [[5, -6, 7, 8]]
    assert packed.indices.tolist() == [[0b10_00_11_01]]
    assert packed.columns().tolist() == [[1, 3, 4, 6]]


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 1, 4), (5, 300, 36), (3, 7, 256), (0, 4, 8), (4, 0, 8)]
)
def test_product_is_that_of_the_dense_matrix(rows, outputs, inputs):
    x = torch.randint(-127, 128, (rows, inputs), generator=torch.Generator().manual_seed(3)).to(
        torch.int8
    )
    weight = sparse_codes(outputs, inputs)
    found = product(x, pack(weight))
    assert found.dtype == torch.int32
    assert torch.equal(found.double(), x.double() @ weight.double().t())


def test_the_most_negative_integer_counts_as_large():
    with pytest.raises(ValueError, match=r"row 0 holds \[1, -128, 2, 0\]"):
        pack(torch.tensor([[1, -128, 2, 0]], dtype=torch.int8))
    matrix = torch.tensor([[1, -128, 0, 0]], dtype=torch.int8)
    assert torch.equal(unpack(pack(matrix)), matrix)


def test_dense_matrices_are_refused():
    matrix = sparse_codes(3, 12)
    matrix[2, 4:8] = torch.tensor([1, 2, 0, 3])
    with pytest.raises(
        ValueError,
        match=r"row 2 holds \[1, 2, 0, 3\] in columns 4 to 7; .*lsq.models.sparsity.choose first",
    ):
        pack(matrix)


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 8, dtype=torch.int8), torch.zeros(2, 12), torch.zeros(12).char()]
)
def test_product_refuses_other_inputs(x):
    with pytest.raises(ValueError, match=r"x must be \[M, 12\]"):
        product(x, pack(sparse_codes(3, 12)))


def test_product_refuses_other_weights():
    packed = pack(sparse_codes(3, 12))
    with pytest.raises(ValueError, match=r"the weight torch.float32"):
        product(
            torch.zeros(2, 12).char(), Packed(values=packed.values.float(), indices=packed.indices)
        )


PAIRS = [[number in pair for number in range(4)] for pair in itertools.combinations(range(4), 2)]
"""All masks of a group; of those that keep as much, the first one keeps what stands first."""


def best(group: list[float]) -> list[bool]:
    return max(
        PAIRS, key=lambda mask: sum(value for value, kept in zip(group, mask, strict=True) if kept)
    )


@pytest.mark.parametrize("shape", [(1, 4), (7, 12), (3, 40), (0, 8)])
def test_keeps_the_two_largest(shape):
    scores = torch.randint(
        0, 5, shape, generator=torch.Generator().manual_seed(1)
    ).float()  # with many ties
    groups = [best(group) for group in scores.reshape(-1, 4).tolist()]
    assert choose(scores).reshape(-1, 4).tolist() == groups
    assert torch.equal(choose(scores), choose(scores.to(torch.int8)))


def test_is_idempotent():
    scores = torch.randn(9, 32, generator=torch.Generator().manual_seed(2)).abs()
    mask = choose(scores)
    assert torch.equal(choose(scores * mask), mask)


def test_nan_and_infinity_are_kept():
    assert choose(torch.tensor([[1.0, math.inf, 2.0, math.nan]])).tolist() == [
        [False, True, False, True]
    ]
    assert choose(torch.full((1, 4), math.nan)).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize(("columns", "use"), [(0, 4), (3, 4), (18, 20)])
def test_widths_that_groups_do_not_fill(columns, use):
    with pytest.raises(
        ValueError, match=rf"fc1 has {columns} inputs, .* multiple of 4; use {use}$"
    ):
        check_width("fc1", columns)
    with pytest.raises(ValueError, match=f"use {use}"):
        choose(torch.zeros(2, columns))
