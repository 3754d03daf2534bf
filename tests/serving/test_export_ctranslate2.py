"""Models for CTranslate2: loaded by the package itself, beside ours with the same weights, in float
and in int8."""

import sys

import pytest
import torch
from torch.testing import assert_close

from lsq.serving import export_ctranslate2
from lsq.serving.decoding_model import DecodingModel, model_of
from lsq.serving.export_ctranslate2 import rounded_rows
from tests.sampling import first
from tests.serving.models import EOS, PADDING, SmallModel, small_model

TRANSLATION = [
    {},
    {"pre_norm": True, "activation": "gelu", "tied": False, "shared": False},
    {"activation": "silu"},
    {"activation": "gelu_tanh"},
    {
        "embedding": {"positions": "learned", "layer_norm": True, "scale": 1.0},
        "quant": {"weight_format": "int4"},
    },
    {"quant": {"weight_format": "int4,*fc2*=int8,*qkv*=int6/row"}},
    {
        "encoder_layers": 1,
        "decoder_layers": 3,
        "quant": {"weight_granularity": "tensor", "bits": 7},
    },
]
LANGUAGE = [
    {"encoder_layers": 0},
    {"encoder_layers": 0, "pre_norm": True, "tied": False, "words": 45},
]


@pytest.fixture
def ctranslate2():
    return pytest.importorskip(
        "ctranslate2", reason="needs CTranslate2; pip install '.[ctranslate2]'"
    )


def vocabularies(model: DecodingModel) -> dict[str, list[str]]:
    """The words of each side; special ones are those of tests/serving/models.py."""
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    return {
        side: [*names, *(f"w{n}" for n in range(4, it.words))]
        for side, it in model.architecture.stacks.items()
    }


def write(folder, model: DecodingModel) -> str:
    known = vocabularies(model)
    export_ctranslate2.write(folder, model, known.get("encoder"), known["decoder"])
    return str(folder)


@torch.no_grad()
def twin(model: DecodingModel, options: dict) -> SmallModel:
    """In float mode, with the weights that the codes stand for."""
    twin = small_model(**options | {"quant": {"mode": "float"}, "tied": False})
    for name, parameter in twin.named_parameters():
        if name + ".codes" in model.tensors:
            rows, columns = parameter.shape
            parameter.copy_(
                model.codes(name, columns)[:rows] * model.tensors[name + ".scale"][:rows, None]
            )
        elif not name.endswith("embed_tokens.weight"):
            parameter.copy_(model.tensors[name])
    for side in model.architecture.stacks:  # words as CTranslate2 has them
        codes, scale = rounded_rows(model.words(side).numpy())
        getattr(twin, side).embed_tokens.weight.copy_(torch.from_numpy(codes / scale[:, None]))
    return twin


def draw(length: int, seed: int) -> torch.Tensor:
    """A sentence int64 [length + 1] with its end."""
    chance = torch.Generator().manual_seed(seed)
    return torch.cat([torch.randint(4, 37, (length,), generator=chance), torch.tensor([EOS])])


PAIRS = [
    (draw(source, 1), draw(target, 2)) for source, target in ((5, 7), (11, 3), (1, 1), (8, 12))
]


def scores(model: SmallModel) -> torch.Tensor:
    """The log-probabilities of all words of the targets, each after the one before, first after the
    end of a sentence.

    A language model knows nothing of the sources.
    """
    befores = [torch.cat([target[-1:], target[:-1]]) for _, target in PAIRS]
    sources, targets, befores = (
        torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=PADDING)
        for sentences in (*zip(*PAIRS, strict=True), befores)
    )
    found = model(sources, befores).log_softmax(dim=2).gather(2, targets[:, :, None])
    return found.squeeze(2)[targets != PADDING]


def scores_by(ctranslate2, path: str, model: DecodingModel, compute_type: str) -> torch.Tensor:
    """The same by CTranslate2."""
    known = vocabularies(model)
    sources, targets = zip(*PAIRS, strict=True)
    if "encoder" in known:
        translator = ctranslate2.Translator(path, compute_type=compute_type)
        results = translator.score_batch(
            [[known["encoder"][word] for word in source[:-1]] for source in sources],
            [[known["decoder"][word] for word in target[:-1]] for target in targets],
        )
    else:
        generator = ctranslate2.Generator(path, compute_type=compute_type)
        results = generator.score_batch(
            [[known["decoder"][word] for word in [EOS, *target]] for target in targets]
        )
    return torch.cat([torch.tensor(result.log_probs) for result in results])


@pytest.mark.parametrize("options", first([*TRANSLATION, *LANGUAGE], 3))
def test_it_computes_with_our_weights(tmp_path, ctranslate2, options):
    """In float as a twin with the same weights; in int8 nearly as ours."""
    ours = small_model(**options)
    model = model_of(ours)
    path = write(tmp_path / "model", model)
    assert ctranslate2.contains_model(path)
    assert export_ctranslate2.is_model_folder(tmp_path / "model")
    found = scores_by(ctranslate2, path, model, "float32")
    assert_close(found, scores(twin(model, options)), rtol=1e-4, atol=2e-4)
    found, expected = scores_by(ctranslate2, path, model, "default"), scores(ours)
    assert 0 < (found - expected).abs().mean() < 0.1 * expected.std()


def test_codes_and_scales_are_the_learned_ones(ctranslate2):
    model = model_of(small_model())
    known = vocabularies(model)
    variables = export_ctranslate2.specification(
        model, known["encoder"], known["decoder"]
    ).variables()
    for theirs, ours in (
        ("encoder/layer_1/self_attention/linear_0", "encoder.layers.1.self_attn.qkv_weight"),
        ("decoder/layer_0/attention/linear_1", "decoder.layers.0.encoder_attn.key_value_weight"),
        ("decoder/layer_0/ffn/linear_1", "decoder.layers.0.feed_forward.fc2_weight"),
        ("decoder/projection", "decoder.output_projection.weight"),
    ):
        found = [variables[f"{theirs}/{part}"] for part in ("weight", "weight_scale")]
        # equal ones are there once, and the others by its name
        found = [variables[one] if isinstance(one, str) else one for one in found]
        codes, scale = (torch.from_numpy(one.numpy()) for one in found)
        assert torch.equal(codes, model.tensors[ours + ".codes"][: len(codes)])
        assert_close(1 / scale, model.tensors[ours + ".scale"][: len(codes)], rtol=2e-7, atol=0)
    assert len(codes) == 37


def test_what_it_cannot_compute_is_refused(tmp_path, ctranslate2):
    for options, words in (
        ({"layer_norm_epsilon": 1e-3}, "norm is 'layer' with an epsilon of 0.001; a model for CTr"),
        ({"gated": True}, "gated is True and bias True; a model for CTranslate2 must have False"),
        ({"bias": False}, "gated is False and bias False"),
        ({"activation": "squared_relu"}, "'squared_relu'"),
    ):
        with pytest.raises(ValueError, match=words):
            model = model_of(small_model(encoder_layers=1, decoder_layers=1, **options))
            write(tmp_path / "model", model)
    model = model_of(small_model(encoder_layers=1, decoder_layers=1))
    with pytest.raises(ValueError, match="vocabulary .* has size 2"):
        export_ctranslate2.write(
            tmp_path / "model", model, ["a", "b"], vocabularies(model)["decoder"]
        )
    assert not list(tmp_path.iterdir())


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    model = model_of(small_model(encoder_layers=1, decoder_layers=1))
    with pytest.raises(
        ModuleNotFoundError, match=r"needs ctranslate2, .*pip install .*\[ctranslate2\]'"
    ):
        write(tmp_path / "model", model)
