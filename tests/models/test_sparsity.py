"""Sparse models against dense ones with zeros, how masks go on, and how matrices are stored."""

import copy
import io
import itertools
import math
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import lsq
from lsq.config import LayerConfig, QuantConfig
from lsq.layers import (
    QuantizedLinear,
    TransformerEncoderLayer,
    TransformerLanguageModel,
    VocabularyProjection,
)
from lsq.models.sparsity import (
    Pruning,
    check_width,
    choose,
    pack,
    sparsify,
    sparsity_of,
    unpack,
    wants_sparsity,
)
from lsq.optim import Adam
from tests.constants import quant_with
from tests.layers.shapes import HIDDEN, config_of
from tests.models import models, zoo

INPUTS, OUTPUTS = 48, 32
DENSE = {"backward": "float", "calibration_passes": 0}
QUANT = quant_with(**DENSE)
SPARSE = quant_with(**DENSE, sparsity="2:4,every=2,decay=0.2")


def layer(seed: int = 1, quant: QuantConfig = QUANT) -> QuantizedLinear:
    torch.manual_seed(seed)
    return QuantizedLinear(INPUTS, OUTPUTS, quant=quant)


def batch(seed: int = 2, rows: int = 13) -> torch.Tensor:
    return torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(seed))


def mask_of(layer: nn.Module) -> torch.Tensor:
    return layer.weight_masks.mask(layer, "weight")


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
    sparse = layer(quant=quant_with(**DENSE, **options)).train(training)
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
    sparse = TransformerEncoderLayer(config_of(mode=mode, calibration_passes=0))
    dense, found = pruned(sparse), sparsify(sparse)
    names = ["self_attn.qkv_weight", "self_attn.out_weight"]
    names += ["feed_forward.fc1_weight", "feed_forward.fc2_weight"]
    assert list(found.weights) == names
    x = torch.randn(5, 3, HIDDEN)
    assert torch.equal(sparse(x), dense(x))
    found.finish()
    assert torch.equal(sparse(x), dense(x))
    assert sparse.state_dict().keys() == dense.state_dict().keys()
    by_output = sparsify(dense, Pruning(measure="output"), run=lambda: dense(x))
    squares = by_output.state_dict()["squares"]
    widths = {name: sparse.get_parameter(name).shape[1:] for name in names}
    assert {name: one.shape for name, one in squares.items()} == widths
    assert all((one > 0).any() for one in squares.values())


def test_by_output():
    """Weights of the smallest inputs are pruned; the error of the output is less."""
    plain, x = layer(quant=QuantConfig(mode="float")), batch(rows=500)
    x = x * torch.tensor([0.01, 3.0, 1.0, 0.3]).repeat(INPUTS // 4)
    wanted, errors = plain(x), {}
    for measure in ("magnitude", "output"):
        sparse = copy.deepcopy(plain)
        run = partial(sparse, x) if measure == "output" else None
        sparsify(sparse, Pruning(measure=measure), run=run)
        errors[measure] = (sparse(x) - wanted).square().sum()
        scores = plain.weight.abs() if run is None else plain.weight.square() * x.square().mean(0)
        assert torch.equal(mask_of(sparse), choose(scores))
    assert errors["output"] < 0.9 * errors["magnitude"]


@pytest.mark.parametrize(
    "quant", [QuantConfig(), QuantConfig(weight_format="int4"), QuantConfig(mode="float")]
)
def test_mean_squares_over_two_passes(quant):
    model = layer(quant=quant)
    batches = [batch(rows=rows) * torch.linspace(0, 2, INPUTS) for rows in (41, 7)]
    model(batches[0])
    sparsity = sparsify(model, Pruning(measure="output"), run=lambda: [model(x) for x in batches])
    squares = sparsity.state_dict()["squares"]
    x = torch.cat(batches).double()
    if quant.quantized:
        scale = model.input_clip.detach() / 127
        x = (x / scale).clamp(-127, 127).round() * scale
    expected = x.square().mean(0).float()
    torch.testing.assert_close(squares["weight"], expected, rtol=1e-4, atol=1e-6)
    assert model._observer is None


# Over a training


@pytest.mark.parametrize("make", [Adam, torch.optim.AdamW, torch.optim.SGD])
def test_fixed_masks(make):
    model = layer()
    sparsity = sparsify(model, Pruning(every=0))
    optimizer = make(model.parameters(), lr=0.01, weight_decay=0.0)
    sparsity.follow(optimizer)
    mask, before = mask_of(model), model.weight.detach().clone()
    losses = train(model, optimizer, 20)
    assert losses[-1] < losses[0]
    assert torch.equal(model.weight[~mask], before[~mask])
    assert not torch.equal(model.weight[mask], before[mask])
    assert torch.equal(mask_of(model), mask) and sparsity.updates == 20
    sparsity.finish()
    assert torch.equal(model.weight != 0, mask)
    train(model, optimizer, 1)
    assert sparsity.updates == 20


def test_equal_steps_of_both_optimizers():
    """lsq's Adam writes codes, and multiplies gradients after the decay was added."""
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
    mask, before = mask_of(model), model.weight.detach().clone()
    model.weight.grad = torch.full_like(model.weight, 0.3)
    share = 0.5 * model.weight.grad.norm() / before.norm()
    optimizer.step()
    drawn = before - 0.1 * (0.3 + share * before)
    expected = torch.where(mask, before - 0.03, drawn)
    torch.testing.assert_close(model.weight, expected, rtol=0, atol=1e-6)


def test_decay_of_nothing():
    """Weights of zeros, and gradients of zeros, are drawn nowhere."""
    model = layer()
    torch.nn.init.zeros_(model.weight)
    sparsity = sparsify(model)
    model.weight.grad = torch.ones_like(model.weight)
    sparsity.draw()
    assert (model.weight.grad == 1).all()


def test_masks_follow_the_weights():
    model, x = layer(), batch()
    sparsity = sparsify(model, Pruning(every=2))
    before = mask_of(model)
    model.eval()(x)
    with torch.no_grad():
        model.weight[:, ::4], model.weight[:, 1::4] = 0.0, 0.0
    sparsity.step()
    assert torch.equal(mask_of(model), before)
    sparsity.step()
    now = mask_of(model)
    assert not now[:, ::4].any() and not now[:, 1::4].any()
    assert sparsity.changed == pytest.approx((now != before).float().mean().item()) != 0
    dense, state = layer(), model.state_dict()
    dense.load_state_dict({name: one for name, one in state.items() if name != "weight_kept"})
    assert torch.equal(model(x), pruned(dense).eval()(x))


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
    """As if it had not been interrupted, with masks by output."""
    pruning = Pruning(every=3, measure="output", begin=1)

    def made(seed: int) -> tuple:
        model = layer(seed)
        sparsity = sparsify(model, pruning, run=lambda: model(batch(9)))
        optimizer = Adam(model.parameters(), lr=0.01)
        sparsity.follow(optimizer)
        return model, sparsity, optimizer

    parts = made(1)
    train(parts[0], parts[2], 5)
    file = io.BytesIO()
    torch.save([one.state_dict() for one in parts], file)
    expected = train(parts[0], parts[2], 6, seed=5)
    others, states = made(4), torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for one, state in zip(others, states, strict=True):
        one.load_state_dict(state)
    assert train(others[0], others[2], 6, seed=5) == expected
    assert others[1].updates == 11


def test_a_parameter_of_two_layers_has_one_mask():
    torch.manual_seed(0)
    first, second = layers = nn.Sequential(QuantizedLinear(32, 32), QuantizedLinear(32, 32))
    second.weight = first.weight
    x = torch.randn(9, 32) * torch.linspace(0.1, 3, 32)
    sparsity = sparsify(layers, Pruning(measure="output"), run=lambda: layers(x))
    assert mask_of(first).equal(mask_of(second))
    sparsity.finish()
    assert (first.weight != 0).float().mean() == 0.5


def test_two_optimizers_do_not_count_twice():
    layers = nn.Sequential(QuantizedLinear(32, 32), QuantizedLinear(32, 32))
    sparsity = sparsify(layers)
    first, second = (torch.optim.SGD(one.parameters(), lr=0.1) for one in layers)
    sparsity.follow(first)
    with pytest.raises(ValueError, match="updates would count twice"):
        sparsity.follow(second)
    sparsity.leave()
    sparsity.follow(second)
    second.step()
    assert sparsity.updates == 1


# QuantConfig(sparsity=...)


def test_a_configuration_does_as_sparsify():
    """The same losses as of a dense layer that sparsify was called on."""
    found = []
    for quant in (SPARSE, QUANT):
        model = layer(quant=quant)
        optimizer = Adam(model.parameters(), lr=0.01)
        sparsity = (
            sparsity_of(model) if quant.sparsity else sparsify(model, Pruning(every=2, decay=0.2))
        )
        sparsity.follow(optimizer)
        found.append(train(model, optimizer, 6))
        assert list(sparsity.weights) == ["weight"] and sparsity.updates == 6
    assert found[0] == found[1]


def test_dense_until_somebody_chooses():
    model, dense, x = layer(quant=SPARSE).eval(), layer().eval(), batch()
    assert wants_sparsity(model) and not wants_sparsity(dense)
    assert torch.equal(model(x), dense(x))
    model.train()
    with pytest.warns(
        UserWarning, match=r"masks stay as they are, .*sparsity_of\(model\).follow\(optimizer\)"
    ):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
        other = layer(quant=SPARSE)
        sparsity_of(other)
        other(x)


def test_a_configured_state_goes_on():
    def optimizer_of(model: nn.Module):
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    model = layer(quant=SPARSE)
    optimizer = optimizer_of(model)
    sparsity_of(model).follow(optimizer)
    train(model, optimizer, 3)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, 4, seed=3)
    later = layer(5, quant=SPARSE)
    later.load_state_dict(states[0])
    optimizer = optimizer_of(later)
    optimizer.load_state_dict(states[1])
    sparsity_of(later, updates=3).follow(optimizer)
    assert train(later, optimizer, 4, seed=3) == expected
    evaluated = layer(6, quant=SPARSE)
    evaluated.load_state_dict(model.state_dict())
    assert torch.equal(evaluated.eval()(batch()), model.eval()(batch()))


def test_a_dense_state_is_one_whose_masks_keep_all():
    model, dense = layer(quant=SPARSE), layer(7)
    sparsity_of(model)
    model.load_state_dict(dense.state_dict())
    assert torch.equal(model.eval()(batch()), dense.eval()(batch()))
    sparsity_of(model)
    assert torch.equal(mask_of(model), choose(dense.weight.abs()))
    model.load_state_dict({"bias": dense.bias}, strict=False)
    assert model.weight_masks.active
    model.load_state_dict({"weight": dense.weight}, strict=False)
    assert not model.weight_masks.active and mask_of(model).all()


def test_begin_after_the_end():
    """Masks of a checkpoint that count no more become zeros."""
    model = layer(quant=quant_with(**DENSE, sparsity="2:4,end=3"))
    sparsity_of(model)
    sparse = model.eval()(batch())
    sparsity_of(model, updates=3)
    assert (model.weight == 0).float().mean() == 0.5 and not model.weight_masks.active
    assert torch.equal(model(batch()), sparse)


def test_zeros_are_written_and_masks_stay():
    model = layer(quant=SPARSE).eval()
    sparsity = sparsity_of(model)
    sparse = model(batch())
    sparsity.write_zeros()
    assert (model.weight == 0).float().mean() == 0.5 and torch.equal(model(batch()), sparse)
    sparsity.finish()
    assert torch.equal(model(batch()), sparse) and "weight_kept" not in model.state_dict()
    assert not wants_sparsity(model)


def test_language_models():
    config = LayerConfig(hidden=32, heads=2, feed_forward=48, quant=SPARSE)
    model = TransformerLanguageModel(48, config, layers=2, padding_idx=0)
    assert len(sparsity_of(model).weights) == 8
    assert "output_projection.weight_kept" not in model.state_dict()


# Models of others


@pytest.mark.parametrize("quant", [QUANT, SPARSE])
def test_converted_models(quant):
    model, tokens = models.model(), models.tokens()
    lsq.convert(model, quant)
    model(tokens)
    found = sparsity_of(model) if quant.sparsity else sparsify(model, skip="blocks.1.up")
    names = {f"blocks.{n}.{name}.weight" for n in (0, 1) for name in ("up", "mix", "down")}
    assert set(found.weights) == names - (set() if quant.sparsity else {"blocks.1.up.weight"})
    mix = model.blocks[0].mix
    assert torch.equal(mask_of(mix).t(), choose(mix.weight.t().abs()))
    state = models.model().state_dict().keys()
    assert lsq.models.float_state_dict(model).keys() == state
    models.loss_of(model(tokens)).backward()
    sparse = model.eval()(tokens)
    if quant.sparsity:
        lsq.revert(model)
    else:
        found.finish()
        assert torch.equal(model(tokens), sparse)
    assert (model.blocks[0].up.weight == 0).float().mean() == 0.5
    assert not any(name.endswith("_kept") for name in model.state_dict())


@pytest.mark.parametrize("mode", ["int8", "float"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_layers_of_transformers(kind, mode):
    """Whose weights are several parameters, or lie [inputs, outputs]."""

    def logits(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the batch, and of two steps of decoding, the second by the layers' own passes."""
        first = model(zoo.words(2, 5), use_cache=True)
        second = model(zoo.words(2, 1), past_key_values=first.past_key_values)
        return model(**given).logits, torch.cat([first.logits, second.logits], dim=1)

    model, given = zoo.made(kind), zoo.right_padded((11, 6))
    lsq.convert(model, quant_with(mode=mode, **DENSE))
    model(**given).loss.backward()
    sparsity = sparsify(model)
    own = model.model.layers[0] if kind == "llama" else model.transformer.h[0]
    assert any("qkv" in path for path in sparsity.weights)
    assert len(sparsity.weights) == (8 if kind == "gpt2" else 10)
    optimizer = Adam([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    sparsity.follow(optimizer)
    model.zero_grad()
    parts = own.sources("self_attn.qkv_weight")
    before = [one.detach().clone() for one in parts]
    model(**given).loss.backward()
    optimizer.step()
    assert all((one != was).any() for one, was in zip(parts, before, strict=True))
    model.eval()
    with torch.no_grad():
        wanted, twin = logits(model), pickle.loads(pickle.dumps(copy.deepcopy(model)))
        sparsity.finish()
        assert all(map(torch.equal, logits(model), wanted))
        assert torch.equal(twin(**given).logits, wanted[0])
    for part in own.sources("self_attn.qkv_weight"):
        groups = (part.t() if kind == "gpt2" else part).unflatten(1, (-1, 4))
        assert (groups != 0).sum(2).max() == 2


# Refused


def test_widths():
    quant = QuantConfig(mode="float")
    model = nn.Sequential(QuantizedLinear(8, 6, quant=quant), QuantizedLinear(6, 2, quant=quant))
    with pytest.raises(ValueError, match=r"1.weight has 6 inputs, .* use 8"):
        sparsify(model)
    assert "0.weight_kept" not in model.state_dict()
    assert list(sparsify(model, skip="1").weights) == ["0.weight"]


@pytest.mark.parametrize(
    ("make", "skip", "message"),
    [
        (lambda: nn.Linear(16, 16), (), r"Linear has no weight to prune; none of its .*: call lsq"),
        (lambda: VocabularyProjection(16, 16), (), r"no weight to prune; its .* projections onto"),
        (lambda: QuantizedLinear(16, 16), "weight", r"no weight to prune; skip leaves none of 1"),
        (layer, "wieght", r"skip names 'wieght', .* near are weight"),
        (layer, "zzz", r"skip names 'zzz', but no module .* is called so; there are weight"),
        (lambda: layer().to("meta"), (), r"weight is on the meta device"),
        (
            lambda: layer(quant=SPARSE),
            (),
            r"weight is sparse already; call finish\(\) of its Sparsity \(lsq.models.sparsity",
        ),
    ],
)
def test_refused(make, skip, message):
    model = make()
    names = model.state_dict().keys()
    with pytest.raises(ValueError, match=message):
        sparsify(model, skip=skip)
    assert model.state_dict().keys() == names


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (layer, r"QuantizedLinear has no sparsity .* no layer of it is to be sparse; make them"),
        (
            lambda: nn.Sequential(layer(quant=SPARSE), layer(quant=QuantConfig(sparsity="2:4"))),
            r"its layers ask for sparsity '2:4', '2:4,every=2,decay=0.2'; make them",
        ),
        (
            lambda: QuantizedLinear(6, 4, quant=QuantConfig(mode="float", sparsity="2:4")),
            r"weight has 6 inputs, .* use 8",
        ),
        (
            lambda: LayerConfig(
                hidden=6, heads=2, feed_forward=8, quant=QuantConfig(mode="float", sparsity="2:4")
            ),
            r"hidden has 6 inputs, .* use 8",
        ),
        (
            lambda: lsq.convert(models.model().to("meta"), SPARSE),
            r"on the meta device, .*; load or initialise it first",
        ),
    ],
)
def test_configurations_that_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        sparsity_of(make())


def test_finished_and_sparse_again():
    model = layer()
    with pytest.raises(ValueError, match="its layers ask for sparsity ''"):
        sparsify(model)
        sparsity_of(model)
    model = layer()
    sparsify(model).finish()
    before = model.weight.detach().clone()
    sparsify(model).finish()
    assert torch.equal(model.weight, before)


# Sparse matrices


def sparse_codes(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    """int8 codes, also with groups of fewer than two values."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (rows, columns), generator=generator).to(torch.int8)
    codes = codes * choose(codes.int().abs())
    codes[:, ::3] = 0
    return codes


@pytest.mark.parametrize("shape", [(1, 4), (5, 8), (3, 12), (17, 44), (0, 16)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.bfloat16])
def test_comes_back(shape, dtype):
    (rows, columns), matrix = shape, sparse_codes(*shape).to(dtype)
    packed = pack(matrix)
    assert packed.values.shape == (rows, columns // 2) and packed.values.dtype == dtype
    assert packed.indices.shape == (rows, -(-columns // 8))
    assert packed.indices.dtype == torch.uint8
    assert torch.equal(unpack(packed), matrix)


def test_where_indices_lie():
    """Values at 1 and 3, and at 0 and 2, in one byte from its lowest bits on."""
    packed = pack(torch.tensor([[0, 5, 0, -6, 7, 0, 8, 0]], dtype=torch.int8))
    assert packed.values.tolist() == [[5, -6, 7, 8]]
    assert packed.indices.tolist() == [[0b10_00_11_01]]
    assert packed.columns().tolist() == [[1, 3, 4, 6]]


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


PAIRS = [[number in pair for number in range(4)] for pair in itertools.combinations(range(4), 2)]
"""All masks of a group; of those that keep as much, the first one keeps what stands first."""


@pytest.mark.parametrize("shape", [(1, 4), (7, 12), (3, 40), (0, 8)])
def test_keeps_the_two_largest(shape):
    def best(group: list[float]) -> list[bool]:
        return max(PAIRS, key=lambda mask: sum(itertools.compress(group, mask)))

    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(0, 5, shape, generator=generator).float()  # with many ties
    groups = [best(group) for group in scores.reshape(-1, 4).tolist()]
    assert choose(scores).reshape(-1, 4).tolist() == groups
    assert torch.equal(choose(scores), choose(scores.to(torch.int8)))


def test_nan_and_infinity_are_kept():
    scores = torch.tensor([[1.0, math.inf, 2.0, math.nan], [math.nan] * 4])
    assert choose(scores).tolist() == [[False, True, False, True], [True, True, False, False]]


@pytest.mark.parametrize(("columns", "use"), [(0, 4), (3, 4), (18, 20)])
def test_widths_that_groups_do_not_fill(columns, use):
    with pytest.raises(
        ValueError, match=rf"fc1 has {columns} inputs, .* multiple of 4; use {use}$"
    ):
        check_width("fc1", columns)
    with pytest.raises(ValueError, match=f"use {use}"):
        choose(torch.zeros(2, columns))


@pytest.mark.parametrize(
    ("measure", "run", "message"),
    [
        ("output", None, r"measure is 'output' and run is None; give run="),
        ("magnitude", lambda: None, r"measure is 'magnitude' and run is <function"),
        ("output", lambda: None, r"weight was not used in this batch"),
    ],
)
def test_a_batch_to_measure_by_that_does_not_fit(measure, run, message):
    with pytest.raises(ValueError, match=message):
        sparsify(layer(), Pruning(measure=measure), run=run)


def test_a_state_of_another_measure_is_refused():
    sparsity = sparsify(layer())
    state = {"updates": 3, "squares": {"weight": torch.ones(INPUTS)}}
    with pytest.raises(ValueError, match="of other weights or another measure: weight is in one"):
        sparsity.load_state_dict(state)
    assert sparsity.updates == 0
