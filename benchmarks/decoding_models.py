"""Models of random weights in any format that lsq decodes, for the benchmarks of decoding."""

import math
from dataclasses import replace

import torch

from lsq.config import LayerConfig
from lsq.quant.formats import Int4
from lsq.serving.architecture import Architecture, StackArchitecture
from lsq.serving.decoding_model import DecodingModel, tensors_of
from lsq.serving.engine import Engine

FORMATS = ("int8", "int4", "int4/row", "int3/row", "int2/row", "ternary/row")
"""Of weights."""
CLIP = 4.0
START = 2


def llama_architecture(layers: int, quick: bool) -> Architecture:
    """A Llama's, 768 wide, with 32,000 words and sinusoidal positions; START begins its texts."""
    size = {"hidden": 32, "heads": 2, "feed_forward": 64}
    if not quick:
        size = {"hidden": 768, "heads": 12, "feed_forward": 2048}
    layer = {"activation": "silu", "gated": True, "bias": False, "norm": "rms", "pre_norm": True}
    stack = StackArchitecture(
        config=LayerConfig(**size, **layer),
        layers=layers,
        words=64 if quick else 32000,
        max_positions=1024,
        positions="sinusoidal",
        embedding_scale=1.0,
        embedding_norm=False,
        final_norm=True,
    )
    symbols = {"bos": 0, "padding": 1, "eos": START, "unk": 3}
    return Architecture(
        encoder=None, decoder=stack, shared_words=False, tied_projection=True, **symbols
    )


def random_model(architecture: Architecture, weight_format: str) -> DecodingModel:
    """A model of this architecture, with its weights in a format; patterns may follow it."""
    stacks = {}
    for side, stack in architecture.stacks.items():
        quant = replace(stack.config.quant, weight_format=weight_format)
        stacks[side] = replace(stack, config=replace(stack.config, quant=quant))
    architecture = replace(architecture, **stacks)

    def largest(name: str) -> int:
        form = architecture.format_of(name.rpartition(".")[0])
        return 7 if isinstance(form, Int4) else form.largest

    tensors = {}
    for name, (shape, dtype) in tensors_of(architecture).items():
        if dtype is torch.int8:
            tensors[name] = torch.randint(-largest(name), largest(name) + 1, shape, dtype=dtype)
        elif name.endswith(".scale"):
            inner = architecture.decoder.config.hidden
            tensors[name] = torch.full(shape, 1 / (largest(name) * math.sqrt(inner)))
        elif "clip" in name:
            tensors[name] = torch.full(shape, CLIP)
        elif "embed_tokens" in name:
            tensors[name] = torch.randn(shape) / math.sqrt(shape[-1])
        else:
            tensors[name] = torch.full(shape, float("norm" in name and "bias" not in name))
    return DecodingModel(architecture=architecture, tensors=tensors)


def packed_megabytes(engine: Engine) -> float:
    """Megabytes of the weights that an engine has packed, which it does when it first decodes."""
    packed = engine._preparation._weights.values()
    parts = (part for weight in packed for part in (weight.tiles, weight.scale))
    return 1e-6 * sum(part.nbytes for part in parts if part is not None)
