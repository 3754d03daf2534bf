"""DecodingModel: the integers of the modules, under their names."""

import pytest
import torch

from lsq.layers import ProgramModule
from lsq.models.sparsity import sparsify
from lsq.serving.decoding_model import DecodingModel, model_of, tensors_of
from tests.serving.models import small_model

VARIANTS = [
    {},
    {"encoder_layers": 0},
    {"pre_norm": True, "shared": False, "tied": False, "embedding": {"layer_norm": True}},
    {"quant": {"weight_format": "int4"}},
    {"embedding": {"positions": "learned", "scale": 1.0}},
    {"quant": {"weight_granularity": "tensor", "bits": 5}},
    {"norm": "rms"},
]


@pytest.mark.parametrize("options", VARIANTS)
def test_tensors_are_those_of_the_modules(options):
    module = small_model(**options)
    model, state, compared = model_of(module), module.state_dict(), 0
    for path, one in module.named_modules():
        if isinstance(one, ProgramModule):
            for name, codes in one.weight_state.kept.items():  # of the last pass
                assert torch.equal(model.tensors[f"{path}.{name}"], codes)
                compared += 1
    assert compared == sum(name.endswith((".codes", ".scale")) for name in model.tensors)
    for name, tensor in model.tensors.items():
        if not name.endswith((".codes", ".scale")):
            assert torch.equal(tensor, state[name]) and tensor.data_ptr() != state[name].data_ptr()
    left = {name for name in state if name not in model.tensors}
    assert not any("bias" in name or "layer_norm" in name for name in left)


def test_sparse_weights_are_what_masks_leave():
    module = small_model()
    sparsity = sparsify(module)
    masked = model_of(module).tensors
    sparsity.finish()
    written = model_of(module).tensors
    assert masked.keys() == written.keys() and all(
        torch.equal(one, written[name]) for name, one in masked.items()
    )
    codes = written["encoder.layers.0.feed_forward.fc1_weight.codes"]
    assert (codes.unflatten(1, (-1, 4)) != 0).sum(2).max() == 2


def test_unpacked_codes_are_what_products_read():
    model = model_of(small_model(quant={"weight_format": "int4"}))
    name = "decoder.layers.0.feed_forward.fc1_weight"
    assert model.tensors[name + ".codes"].shape == (96, 2 * 17)
    assert model.codes(name, 48).shape == (96, 48)


def test_shared_words_stand_once():
    model = model_of(small_model())
    assert "encoder.embed_tokens.weight" not in model.tensors
    assert model.words("encoder") is model.words("decoder")
    apart = model_of(small_model(shared=False))
    assert apart.words("encoder").shape == (43, 48) and apart.words("decoder").shape == (37, 48)


def test_tensors_that_do_not_fit_are_refused():
    model = model_of(small_model())
    name = next(iter(tensors_of(model.architecture)))
    for change, words in [
        ({name: None}, f"lacks tensors: {name}"),
        ({"more": torch.ones(1)}, "unknown tensors: more"),
        ({name: torch.ones(3)}, "it must be"),
        ({name: model.tensors[name].double()}, "float64"),
    ]:
        tensors = {
            key: value for key, value in (dict(model.tensors) | change).items() if value is not None
        }
        with pytest.raises(ValueError, match=words):
            DecodingModel(architecture=model.architecture, tensors=tensors)


@pytest.mark.parametrize(
    "field, form",
    [
        ("weight_format", "int4"),
        ("weight_format", "nvfp4"),
        ("weight_format", "float32"),
        ("activation_format", "fp8-e4m3/row"),
        ("gradient_format", "float32"),
    ],
)
def test_layers_in_different_formats_are_refused(field, form):
    """As fairseq's plugin makes them, each with a configuration for its place."""
    module = small_model()
    other = small_model(quant={field: form})
    module.decoder.layers[1] = other.decoder.layers[1]
    with pytest.raises(
        ValueError, match=f"{field} differs .*in decoder.layers.1.*--{field.replace('_', '-')} int8"
    ):
        model_of(module)


def test_other_modules_are_refused():
    with pytest.raises(ValueError, match="eval mode"):
        model_of(small_model().train())
    with pytest.raises(ValueError, match="models are kept as codes"):
        model_of(small_model(quant={"mode": "float"}))
    module = small_model(pre_norm=True, norm="rms")
    module.decoder.layer_norm = torch.nn.LayerNorm(48)
    with pytest.raises(
        ValueError, match="the final norm is a LayerNorm behind layers of another norm; use RMSNorm"
    ):
        model_of(module)
