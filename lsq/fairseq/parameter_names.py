"""Parameters of fairseq's transformer under this model's names, and back.

fairseq keeps the projections of one attention apart; here the self-attention's query, key and value
and the cross-attention's key and value are rows of one weight, in this order.
"""

import re
from collections import defaultdict

import torch
from torch import Tensor

_RENAMED = (
    (r"embed_positions\.weight", "embed_tokens.position_weight"),
    (r"layernorm_embedding\.", "embed_tokens.layer_norm."),
    (r"\.(self_attn|encoder_attn)\.out_proj\.", r".\1.out_"),
    (r"\.encoder_attn\.q_proj\.", ".encoder_attn.query_"),
    (r"(layers\.\d+)\.(fc[12])\.", r"\1.feed_forward.\2_"),
)
"""(pattern in fairseq's name, replacement)"""

_JOINED = (
    (r"\.self_attn\.([qkv])_proj\.", "qkv", ".self_attn.qkv_"),
    (r"\.encoder_attn\.([kv])_proj\.", "kv", ".encoder_attn.key_value_"),
)
"""(pattern in fairseq's name with the part in a group, all parts in order, replacement)"""

_SPLIT = (
    (r"\.self_attn\.qkv_", "qkv", ".self_attn.{}_proj."),
    (r"\.encoder_attn\.key_value_", "kv", ".encoder_attn.{}_proj."),
)
"""(pattern in our name of a joined weight, its parts in order, replacement)"""

_RESTORED = (
    (r"embed_tokens\.position_weight", "embed_positions.weight"),
    (r"embed_tokens\.layer_norm\.", "layernorm_embedding."),
    (r"\.(self_attn|encoder_attn)\.out_", r".\1.out_proj."),
    (r"\.encoder_attn\.query_", ".encoder_attn.q_proj."),
    (r"(layers\.\d+)\.feed_forward\.(fc[12])_", r"\1.\2."),
)
"""(pattern in our name, replacement)"""

_CONSTANT = re.compile(r"(en|de)coder\.(version|embed_positions\._float_tensor)")
"""What fairseq's checkpoints hold besides parameters."""


def rename(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of fairseq's transformer under this model's names, those of one joined weight
    concatenated.

    Names that fairseq's transformer does not have stay as they are.

    Raises:
        ValueError: a part of a joined weight is missing, or does not fit the others.
    """
    renamed: dict[str, Tensor] = {}
    joined: dict[tuple[str, str], dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in state.items():
        if _CONSTANT.fullmatch(name):
            continue
        for pattern, order, replacement in _JOINED:
            if match := re.search(pattern, name):
                joined[name.replace(match[0], replacement), order][match[1]] = tensor
                break
        else:
            for pattern, replacement in _RENAMED:
                name = re.sub(pattern, replacement, name)
            renamed[name] = tensor
    for (target, order), tensors in joined.items():
        if missing := [part for part in order if part not in tensors]:
            raise ValueError(
                f"{target} needs the projections {', '.join(order)} of fairseq's transformer, but"
                " the checkpoint "
                f"has no {', '.join(missing)}"
            )
        parts = [tensors[part] for part in order]
        if len({part.shape[1:] for part in parts}) > 1 or not parts[0].dim():
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise ValueError(
                f"{target} joins projections, whose shapes in the checkpoint do not fit: {shapes}"
            )
        renamed[target] = torch.cat(parts)
    return renamed


def restore(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `rename` takes: parameters of this model under the names of fairseq's transformer,
    joined weights apart."""
    restored: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for pattern, parts, replacement in _SPLIT:
            if re.search(pattern, name):
                names = (re.sub(pattern, replacement.format(part), name) for part in parts)
                restored |= zip(names, tensor.chunk(len(parts)), strict=True)
                break
        else:
            for pattern, replacement in _RESTORED:
                name = re.sub(pattern, replacement, name)
            restored[name] = tensor
    return restored
