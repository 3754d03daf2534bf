"""Self-attention whose queries and keys turn: the block, and what its programs take beside their rows."""

from functools import lru_cache

import torch

from lsq.config import LayerConfig, Rotary
from lsq.ops.rotation import HeadNorms, Rotate, Rotation, rotation_table
from lsq.program.builder import Builder
from lsq.program.parameters import Kind
from lsq.program.tensor import VirtualTensor
from lsq.program.values import Rows


def turn_heads(builder: Builder, config: LayerConfig, x: VirtualTensor, y: Rows, prefix: str) -> Rows:
    """Queries, keys and values x [M, ...] -> y, the queries and keys turned, before that normed if heads have norms.

    Declares the inputs of `rotation_inputs`.
    """
    rows, width, norms = x.shape[0], config.head_columns, None
    if config.head_norm is not None:
        query, key = (
            builder.parameter(f"{prefix}{part}_norm.weight", (width,), Kind.NORM_WEIGHT, start=1.0)
            for part in ("query", "key")
        )
        rstd = builder.tensor(prefix + "heads.rstd", (rows, config.heads + config.of_keys))
        norms = HeadNorms(query=query, key=key, rstd=rstd, epsilon=config.head_norm)
    rotation = Rotation(
        table=builder.input("rotation", (config.rotary.places, config.rotary.columns(width))),
        places=builder.input("places", (rows,), torch.int64), width=width, queries=config.heads, keys=config.of_keys,
    )
    builder.add(Rotate(x=x, rotation=rotation, norms=norms, out=y.floats, rounded=y.coded))
    return y


def rotation_inputs(config: LayerConfig, places: torch.Tensor, longest: int) -> dict[str, torch.Tensor]:
    """Inputs of a program with the layer's self-attention, by name; none where nothing turns.

    Args:
        config: of the layer.
        places: int64 [M], of each row in its sentence.
        longest: places are below this number.

    Raises:
        ValueError: a sentence has more words than there are places.
    """
    rotary = config.rotary
    if rotary is None:
        return {}
    if longest > rotary.places:
        raise ValueError(
            f"a sentence of {longest} words has no more than {rotary.places} places to turn by; shorten it, or give "
            "Rotary more places"
        )
    return {"places": places, "rotation": _table(rotary, config.head_columns, places.device)}


@lru_cache(maxsize=16)
def _table(rotary: Rotary, head_columns: int, device: torch.device) -> torch.Tensor:
    """The same for all layers of a model. Made outside of inference mode, so that training may use it as well."""
    turned = rotary.columns(head_columns)
    if rotary.frequencies is None:
        frequencies = rotary.base ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    else:
        frequencies = torch.tensor(rotary.frequencies, dtype=torch.float64)
    with torch.inference_mode(False):
        return rotation_table(frequencies, rotary.places, rotary.factor).to(device)
