"""Layers of transformers and PyTorch that have a program, an architecture a file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from torch import nn

from lsq.layers.in_place import class_in_place

if TYPE_CHECKING:
    from lsq.models.fused_layer import FusedLayer

LAYERS = {
    **dict.fromkeys(
        ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"),
        "llama.LlamaLayer",
    ),
    "GPT2Block": "gpt2.GPT2Layer",
    **dict.fromkeys(
        (
            "BertLayer",
            "BertGenerationLayer",
            "CamembertLayer",
            "Data2VecTextLayer",
            "ElectraLayer",
            "ErnieLayer",
            "RobertaLayer",
            "RoCBertLayer",
            "XLMRobertaLayer",
        ),
        "bert.BertLayer",
    ),
    **dict.fromkeys(
        (
            "ViTLayer",
            "ASTLayer",
            "DeiTLayer",
            "IJepaLayer",
            "ViTMAELayer",
            "ViTMSNLayer",
            "VivitLayer",
        ),
        "vit.ViTLayer",
    ),
    **{
        f"{name}{part}Layer": f"marian.{part}Layer"
        for name in ("Marian", "Bart")
        for part in ("Encoder", "Decoder")
    },
    **{
        f"{name}{part}Layer": f"marian.PreNorm{part}Layer"
        for name in ("MBart", "M2M100", "Pegasus")
        for part in ("Encoder", "Decoder")
    },
    **dict.fromkeys(("T5Block", "MT5Block"), "t5.block_class"),
    "TransformerEncoderLayer": "pytorch.EncoderLayer",
}
"""Names of their classes -> the file of this folder and the class in it, or a function of the layer
that returns the class."""


def fused_class(layer: nn.Module) -> type[FusedLayer] | None:
    """Return the class that a layer becomes; None: there is no program for it, or it is fused
    already."""
    kind = type(layer)
    if kind.__name__ not in LAYERS:
        return None
    file, name = LAYERS[kind.__name__].split(".")
    if not kind.__module__.startswith("torch.nn." if file == "pytorch" else "transformers.models."):
        return None
    base = getattr(import_module(f"lsq.models.architectures.{file}"), name)
    base = base if isinstance(base, type) else base(layer)
    return class_in_place(base, kind, f"Fused{kind.__name__}")
