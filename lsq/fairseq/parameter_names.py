"""Parameters of fairseq's transformer under this model's names, and back.

fairseq keeps the projections of one attention apart; here the self-attention's query, key and value
and the cross-attention's key and value are rows of one weight, in this order.
"""

import re
from collections import defaultdict

import torch
from torch import Tensor

_RENAMED = (
    ("embed_positions.weight", "embed_tokens.position_weight"),
    ("layernorm_embedding.", "embed_tokens.layer_norm."),
    (".self_attn.out_proj.", ".self_attn.out_"),
    (".encoder_attn.out_proj.", ".encoder_attn.out_"),
    (".encoder_attn.q_proj.", ".encoder_attn.query_"),
    (".fc1.", ".feed_forward.fc1_"),
    (".fc2.", ".feed_forward.fc2_"),
)
"""Parts of names: (fairseq's, ours)."""
_JOINED = (
    (".self_attn.{}_proj.", "qkv", ".self_attn.qkv_"),
    (".encoder_attn.{}_proj.", "kv", ".encoder_attn.key_value_"),
)
"""(part of fairseq's name, letters of the projections in order, part of our name)"""
_CONSTANT = re.compile(r"(en|de)coder\.(version|embed_positions\._float_tensor)")
"""What fairseq's checkpoints hold besides parameters."""


def rename(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of fairseq's transformer under this model's names, those of one joined weight
    concatenated. Names that fairseq's transformer does not have stay as they are.

    Raises:
        ValueError: a part of a joined weight is missing, or does not fit the others.
    """
    renamed: dict[str, Tensor] = {}
    joined: dict[tuple[str, str], dict[str, Tensor]] = defaultdict(dict)
    parts = {
        theirs.format(letter): (letter, letters, ours)
        for theirs, letters, ours in _JOINED
        for letter in letters
    }
    for name, tensor in state.items():
        if part := next((part for part in parts if part in name), None):
            letter, letters, ours = parts[part]
            joined[name.replace(part, ours), letters][letter] = tensor
        elif not _CONSTANT.fullmatch(name):
            for theirs, ours in _RENAMED:
                name = name.replace(theirs, ours)
            renamed[name] = tensor
    for (name, letters), tensors in joined.items():
        if missing := [letter for letter in letters if letter not in tensors]:
            raise ValueError(
                f"{name} needs the projections {', '.join(letters)} of fairseq's transformer, but"
                f" the checkpoint has no {', '.join(missing)}"
            )
        projections = [tensors[letter] for letter in letters]
        if len({one.shape[1:] for one in projections}) > 1 or not projections[0].dim():
            shapes = ", ".join(str(list(one.shape)) for one in projections)
            raise ValueError(
                f"{name} joins projections, whose shapes in the checkpoint do not fit: {shapes}"
            )
        renamed[name] = torch.cat(projections)
    return renamed


def restore(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo `rename`: joined weights apart again, under the names of fairseq's transformer."""
    restored: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for theirs, letters, ours in _JOINED:
            if ours in name:
                names = [name.replace(ours, theirs.format(letter)) for letter in letters]
                restored |= zip(names, tensor.chunk(len(letters)), strict=True)
                break
        else:
            for theirs, ours in _RENAMED:
                name = name.replace(ours, theirs)
            restored[name] = tensor
    return restored
