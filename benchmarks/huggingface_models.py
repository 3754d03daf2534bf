"""Models of Hugging Face transformers and of PyTorch, and batches for them: nothing is downloaded.

Each has its loss and about 100 million weights; `layers` and `quick` make it smaller. Dropout is
what the configuration
has: 0.1 in GPT-2, BERT and PyTorch's encoder, none in Llama and ViT.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn

# one that cannot be loaded would stop transformers, which looks for it
sys.modules.setdefault("torchaudio", None)

QUICK = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
BASE = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}
HEADS = "lm_head", "classifier"
"""Layers that nobody multiplies in int8: what comes after a model's own layers."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is made, and a batch for it."""

    title: str
    make: Callable[[int, bool], nn.Module]
    """(layers, quick) -> the model in train mode; raises ImportError without transformers."""
    batch: Callable[[nn.Module, int], dict[str, torch.Tensor]]
    """(model, sentences or images) -> keyword arguments of its forward, labels among them."""
    length: int
    """Tokens a sentence or image."""
    quick_length: int


def language_model_batch(length: int) -> Callable:
    """Random words of sentences this long, or of the model's longest, which are their own
    labels."""

    def batch(model: nn.Module, count: int) -> dict[str, torch.Tensor]:
        words = torch.randint(
            model.config.vocab_size, (count, min(length, model.config.max_position_embeddings))
        )
        return {"input_ids": words, "labels": words}

    return batch


def sentence_batch(length: int) -> Callable:
    """Random words of sentences this long, or of the model's longest, each with a label."""

    def batch(model: nn.Module, count: int) -> dict[str, torch.Tensor]:
        words = language_model_batch(length)(model, count)["input_ids"]
        return {"input_ids": words, "labels": torch.randint(model.config.num_labels, (count,))}

    return batch


def image_batch(model: nn.Module, count: int) -> dict[str, torch.Tensor]:
    """Random images, each with a label."""
    config = model.config
    pixels = torch.randn(count, config.num_channels, config.image_size, config.image_size)
    return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (count,))}


def gpt2(layers: int, quick: bool) -> nn.Module:
    """GPT-2 small with its language modelling loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {
        "n_embd": 64,
        "n_head": 2,
        "vocab_size": 256,
        "n_positions": 16,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, **(small if quick else {})))


def llama(layers: int, quick: bool) -> nn.Module:
    """A Llama of GPT-2 small's size, 110 million weights with tied embeddings, and its language
    modelling loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {**QUICK, "vocab_size": 256} if quick else {**BASE, "vocab_size": 32000}
    length = 16 if quick else 1024
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            max_position_embeddings=length,
            tie_word_embeddings=True,
            **size,
        )
    )


def bert(layers: int, quick: bool) -> nn.Module:
    """BERT base as a classifier of sentences."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(num_hidden_layers=layers, **({**QUICK, "vocab_size": 256} if quick else {}))
    )


def vit(layers: int, quick: bool) -> nn.Module:
    """ViT-B/16 as a classifier of images of 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    size = {**QUICK, "image_size": 48, "num_labels": 10} if quick else {"num_labels": 1000}
    return ViTForImageClassification(ViTConfig(num_hidden_layers=layers, **size))


class Encoder(nn.Module):
    """torch.nn.TransformerEncoder that learns to give `labels` back, floats of the inputs'
    shape."""

    def __init__(self, layers: int, hidden: int, heads: int, feed_forward: int):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            hidden, heads, feed_forward, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.hidden = hidden

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """`loss`: of inputs [sentences, tokens, hidden]."""
        return SimpleNamespace(loss=nn.functional.mse_loss(self.encoder(inputs), labels))


def encoder(layers: int, quick: bool) -> nn.Module:
    """PyTorch's own encoder of BERT base's size, by itself."""
    return Encoder(layers, *((64, 2, 128) if quick else (768, 12, 3072)))


def encoder_batch(model: nn.Module, count: int) -> dict[str, torch.Tensor]:
    """Random inputs of 128 tokens and what they are to become."""
    inputs, labels = torch.randn(2, count, 128, model.hidden)
    return {"inputs": inputs, "labels": labels}


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Freeze a model and add LoRA adapters to all of its linear layers; raises ImportError without
    peft."""
    import peft

    targets = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_conv1d(module)) and not name.endswith(HEADS)
    ]
    return peft.get_peft_model(
        model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
    )


RECIPES = {
    "gpt2": Recipe(
        title="GPT-2 small",
        make=gpt2,
        batch=language_model_batch(1024),
        length=1024,
        quick_length=16,
    ),
    "llama": Recipe(
        title="Llama 110M",
        make=llama,
        batch=language_model_batch(1024),
        length=1024,
        quick_length=16,
    ),
    "bert": Recipe(
        title="BERT base", make=bert, batch=sentence_batch(128), length=128, quick_length=128
    ),
    "vit": Recipe(title="ViT-B/16", make=vit, batch=image_batch, length=197, quick_length=10),
    "encoder": Recipe(
        title="nn.TransformerEncoder",
        make=encoder,
        batch=encoder_batch,
        length=128,
        quick_length=128,
    ),
}
"""By the names of --models."""


def sharing(model: nn.Module) -> nn.Module:
    """A copy with the same parameters, and buffers of its own."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is a linear layer with a weight [inputs, outputs], as GPT-2 has them."""
    return type(module).__name__ == "Conv1D"


def with_linears(model: nn.Module) -> nn.Module:
    """Every Conv1D in it replaced by a torch.nn.Linear, which is all that torchao and SDNQ
    convert."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_conv1d(child):
                linear = nn.Linear(*child.weight.shape, dtype=child.weight.dtype)
                with torch.no_grad():
                    linear.weight.copy_(child.weight.t())
                    linear.bias.copy_(child.bias)
                setattr(parent, name, linear)
    return model
