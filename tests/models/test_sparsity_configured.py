"""QuantConfig(sparsity=...): layers that have their masks from the beginning, and who chooses
these."""

import copy
import warnings

import pytest
import torch
from torch import nn

import lsq
from lsq.config import LayerConfig, QuantConfig
from lsq.layers import QuantizedLinear, TransformerLanguageModel
from lsq.models.sparsity import Pruning, choose, sparsify, sparsity_of, wants_sparsity
from lsq.optim import Adam
from tests.constants import quant_with
from tests.models import models
from tests.models.test_sparsity import INPUTS, OUTPUTS, batch, layer, train

QUANT = {"backward": "float", "calibration_passes": 0}
SPARSE = quant_with(**QUANT, sparsity="2:4,every=2,decay=0.2")


def test_as_sparsify_does():
    """The same losses as of a dense layer that sparsify was called on."""
    found = []
    for quant in (SPARSE, quant_with(**QUANT)):
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


def test_a_state_goes_on(tmp_path):
    model = layer(quant=SPARSE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sparsity_of(model).follow(optimizer)
    train(model, optimizer, 3)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, 4, seed=3)
    later = layer(5, quant=SPARSE)
    later.load_state_dict(states[0])
    optimizer = torch.optim.AdamW(later.parameters(), lr=0.01)
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
    assert torch.equal(model.weight_masks.mask(model, "weight"), choose(dense.weight.abs()))
    model.load_state_dict({"bias": dense.bias}, strict=False)
    assert model.weight_masks.active
    model.load_state_dict({"weight": dense.weight}, strict=False)
    assert not model.weight_masks.active and model.weight_masks.mask(model, "weight").all()


def test_begin_after_the_end():
    """Masks of a checkpoint that count no more become zeros."""
    model = layer(quant=quant_with(**QUANT, sparsity="2:4,end=3"))
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


def test_converted_models():
    model = models.model()
    lsq.convert(model, SPARSE)
    sparsity = sparsity_of(model)
    assert set(sparsity.weights) == {
        f"blocks.{n}.{name}.weight" for n in (0, 1) for name in ("up", "mix", "down")
    }
    models.loss_of(model(models.tokens())).backward()
    assert lsq.models.float_state_dict(model).keys() == models.model().state_dict().keys()
    lsq.revert(model)
    assert (model.blocks[0].up.weight == 0).float().mean() == 0.5


def test_language_models():
    config = LayerConfig(hidden=32, heads=2, feed_forward=48, quant=SPARSE)
    model = TransformerLanguageModel(48, config, layers=2, padding_idx=0)
    assert (
        len(sparsity_of(model).weights) == 8
        and "output_projection.weight_kept" not in model.state_dict()
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            layer,
            r"QuantizedLinear has no sparsity .* no layer of it is to be sparse; make them with one"
            r" QuantConfig",
        ),
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
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        sparsity_of(make())


def test_own_masks_and_those_of_the_configuration():
    model = nn.Sequential(layer(), nn.Linear(OUTPUTS, INPUTS))
    sparsify(model)
    with pytest.raises(ValueError, match="its layers ask for sparsity ''"):
        sparsity_of(model)
    with pytest.raises(
        ValueError,
        match=r"weight is sparse already; call finish\(\) of its Sparsity \(lsq.models.sparsity",
    ):
        sparsify(layer(quant=SPARSE))
