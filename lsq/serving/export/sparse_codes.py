"""Codes that are 2:4 sparse as files keep them: the values that count and their places, in 5/8 of
the bytes.

In the place of W.codes int8 [N, K] stand W.codes.values int8 [N, K / 2] and W.codes.indices uint8
[N, ceil(K / 8)]; see lsq/models/sparsity/packed.py.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lsq.models.sparsity import Packed, is_sparse, pack, unpack

CODES, VALUES, INDICES = ".codes", ".codes.values", ".codes.indices"


def split(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, with those of sparse codes in the place of each.

    Args:
        tensors: of a DecodingModel whose format of weights is not packed.
    """
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(CODES) and is_sparse(tensor):
            packed, name = pack(tensor), name.removesuffix(CODES)
            found |= {name + VALUES: packed.values, name + INDICES: packed.indices}
        else:
            found[name] = tensor
    return found


def join(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `split` was given.

    Raises:
        ValueError: one of a pair is missing, or they do not fit each other.
    """
    found = {
        name: tensor for name, tensor in tensors.items() if not name.endswith((VALUES, INDICES))
    }
    names = {
        name.removesuffix(end)
        for end in (VALUES, INDICES)
        for name in tensors
        if name.endswith(end)
    }
    for name in sorted(names):
        values, indices = tensors.get(name + VALUES), tensors.get(name + INDICES)
        if values is None or indices is None:
            raise ValueError(f"{name} has values or indices alone")
        if not (
            values.dtype == torch.int8
            and values.dim() == 2
            and values.shape[1] % 2 == 0
            and indices.dtype == torch.uint8
            and indices.shape == (len(values), -(-values.shape[1] // 4))
        ):
            raise ValueError(
                f"{name} has values {values.dtype} {list(values.shape)} and indices {indices.dtype}"
                " "
                f"{list(indices.shape)}; they must be int8 [N, K / 2] and uint8 [N, K / 8]"
            )
        found[name + CODES] = unpack(Packed(values=values, indices=indices))
    return found
