"""DecodingModel: the integers of the modules, under their names."""

import pytest
import torch

from lsq.layers import ProgramModule
from lsq.models.sparsity import sparsify
from lsq.serving.decoding_model import DecodingModel, model_of, tensors_of
from tests.serving.models import MIX, WHOLE_MIX, small_model

VARIANTS = [
    {},
    {"encoder_layers": 0},
    {"pre_norm": True, "shared": False, "tied": False, "embedding": {"layer_norm": True}},
    {"quant": {"weight_format": "int4"}},
    {"embedding": {"positions": "learned", "scale": 1.0}},
    {"quant": {"weight_granularity": "tensor", "bits": 5}},
    {"norm": "rms"},
    {"quant": {"weight_format": MIX}, "tied": False},
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
    ("mix", "decoded", "expected"),
    [
        (MIX, "decoder.layers.1.feed_forward.fc1_weight", "int4"),
        (MIX, "decoder.layers.1.feed_forward.fc2_weight", "int8"),
        (MIX, "encoder.layers.0.self_attn.qkv_weight", "int3/row"),
        (MIX, "decoder.layers.0.self_attn.qkv_weight", "int2/row"),
        (MIX, "decoder.layers.0.encoder_attn.out_weight", "ternary/tensor"),
        (WHOLE_MIX, "decoder.output_projection.weight", "int6/row"),
        (WHOLE_MIX, "encoder.layers.1.feed_forward.fc1_weight", "fp4-e2m1/row"),
    ],
)
def test_each_weight_has_its_own_format(mix, decoded, expected):
    """As in fairseq's plugin, each layer has a configuration for its place."""
    model, alone = (
        model_of(small_model(quant={"weight_format": form, "clips": "learned"}))
        for form in (mix, expected)
    )
    own, other = (one.architecture.format_of(decoded) for one in (model, alone))
    assert (own.bits, own.grain, own.largest) == (other.bits, other.grain, other.largest)
    for part in (".codes", ".scale"):
        assert torch.equal(model.tensors[decoded + part], alone.tensors[decoded + part])


def test_a_format_that_all_weights_share_has_no_pattern():
    module = small_model(quant={"weight_format": "int4,*fc2*=int2/row,*=int2/row"})
    stack = model_of(module).architecture.decoder
    assert stack.config.quant.weight_format == "int2/row"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"weight_format": "int8,*fc2*=nvfp4"},
            "encoder.layers.0.feed_forward.fc2_weight in nvfp4",
        ),
        (
            {"weight_format": "int8,decoder.layers.1.*out*=float32"},
            "decoder.layers.1.self_attn.out_weight in float32, activations in int8",
        ),
        (
            {"weight_format": "int8,*output_projection*=int2/group16"},
            "decoder.output_projection.weight in int2/group16",
        ),
        (
            {"activation_format": "int8,decoder.layers.1.feed_forward.input=fp8-e4m3/row"},
            "decoder.layers.1.self_attn.qkv_weight in int8, activations in int8,feed.*=fp8-e4m3",
        ),
    ],
)
def test_a_weight_that_cannot_be_kept_as_codes_is_named(options, said):
    with pytest.raises(ValueError, match=f"^{said}.*; models are kept as codes with activations"):
        model_of(small_model(quant=options))


def test_gates_of_which_only_some_round_by_rows_are_refused():
    gated = {"gated": True, "activation": "silu", "bias": False}
    for clips in ("auto", "learned"):
        module = small_model(**gated, quant={"weight_format": "int8,*.0.*=int4", "clips": clips})
        if clips == "auto":
            with pytest.raises(ValueError, match='clips is "auto".*train with clips="learned"'):
                model_of(module)
        else:
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
