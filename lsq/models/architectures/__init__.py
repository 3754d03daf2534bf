"""Classes of layers of transformers, PyTorch and PyTorch Geometric for which there is a program."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from torch import nn

from lsq.layers.in_place import class_in_place

if TYPE_CHECKING:
    from lsq.models.fused_layer import FusedLayer

_BERT = "Bert BertGeneration Camembert Data2VecText Electra Ernie Roberta RoCBert XLMRoberta"
_NAMES = {
    "transformers.LlamaLayer": [
        f"{one}DecoderLayer" for one in "Llama Mistral Qwen2 Qwen3".split()
    ],
    "transformers.GPT2Layer": ["GPT2Block"],
    "transformers.BertLayer": [f"{one}Layer" for one in _BERT.split()],
    "transformers.ViTLayer": [
        f"{one}Layer" for one in "ViT AST DeiT IJepa ViTMAE ViTMSN Vivit".split()
    ],
    **{
        f"transformers.{kind}{part}Layer": [f"{one}{part}Layer" for one in names]
        for kind, names in (
            ("Marian", ("Marian", "Bart")),
            ("MBart", ("MBart", "M2M100", "Pegasus")),
        )
        for part in ("Encoder", "Decoder")
    },
    "t5.block_class": ["T5Block", "MT5Block"],
    "pytorch.EncoderLayer": ["TransformerEncoderLayer"],
    "graph.GCNStack": ["GCN"],
    "graph.SAGEStack": ["GraphSAGE"],
    "graph.GCNLayer": ["GCNConv"],
    "graph.SAGELayer": ["SAGEConv"],
    "graph.GINLayer": ["GINConv"],
    "graph.GraphConvLayer": ["GraphConv"],
}
GRAPH_LAYERS = [name for home, names in _NAMES.items() for name in names if "graph." in home]
LAYERS = {name: home for home, names in _NAMES.items() for name in names}
"""Name of a layer's class -> "file.name" in this folder: the class to use, or a function of the
layer that returns it."""
_PACKAGES = {"pytorch": "torch.nn.", "graph": "torch_geometric.nn."}
"""File in this folder -> begin of the modules with its layers, if not those of transformers."""


def fused_class(layer: nn.Module) -> type[FusedLayer] | None:
    """Return the class that a layer becomes; None if no program exists, or it is fused already."""
    kind = type(layer)
    if kind.__name__ not in LAYERS:
        return None
    file, name = LAYERS[kind.__name__].split(".")
    if not kind.__module__.startswith(_PACKAGES.get(file, "transformers.models.")):
        return None
    base = getattr(import_module(f"lsq.models.architectures.{file}"), name)
    base = base if isinstance(base, type) else base(layer)
    return class_in_place(base, kind, f"Fused{kind.__name__}")
