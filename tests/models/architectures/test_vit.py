"""Layers of ViT and of those that share it as fused ones."""

import pytest
import torch

from lsq.models.architectures import LAYERS
from tests.models.checks import (
    FLOAT,
    assert_same_alone,
    assert_same_in_float,
    assert_trains_and_comes_back,
    fused,
    made,
    transformers,
    without_dropout,
)

SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 3,
}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def vit(**options) -> torch.nn.Module:
    return made(
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**SHAPE, **{**STILL, **options})
        )
    )


def images(count: int) -> dict[str, torch.Tensor]:
    drawn = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": drawn, "labels": torch.arange(count) % 3}


@pytest.mark.parametrize(
    "options", [{}, {"qkv_bias": False, "hidden_act": "relu", "attn_implementation": "eager"}]
)
def test_the_same_as_transformers_in_float(options):
    assert_same_in_float(vit(**options), images(5))


@pytest.mark.parametrize("kind", [kind for kind, file in LAYERS.items() if file == "vit.ViTLayer"])
def test_every_layer_that_is_vits(kind):
    assert_same_alone(kind, **SHAPE, **STILL)


def test_trains_and_comes_back(tmp_path):
    assert_trains_and_comes_back(vit(), images(7), tmp_path)


def test_dropout_is_read_from_the_layer():
    mine = fused(vit(hidden_dropout_prob=0.25, attention_probs_dropout_prob=0.125), FLOAT)
    batch, layer = images(2), mine.vit.layers[1]
    mine(**batch)
    assert (layer.config.attention_dropout, layer.config.dropout) == (0.125, 0.25)
    without_dropout(mine)
    for one in mine.vit.layers:
        one.attention.attention_dropout = 0.0
    assert torch.equal(mine(**batch).logits, mine(**batch).logits)


def test_a_mask_of_patches():
    """Patches that are not there, as those of an image that is smaller than others."""
    model, batch = vit(), images(3)
    mask = torch.ones(3, 17, dtype=torch.long)
    mask[1, 9:] = 0
    assert_same_in_float(model, {**batch, "attention_mask": mask})
