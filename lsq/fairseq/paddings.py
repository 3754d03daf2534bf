"""Where the sentences of a batch have padding, kept on the CPU beside a batch that fairseq moves to
a GPU.

The sizes of a batch choose the programs that run, and nobody should wait for a GPU to tell them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

BATCH = "lsq_paddings"
"""Under which name a batch has its Paddings."""


@dataclass(frozen=True)
class Paddings:
    """Masks bool [B, T] on the CPU, True is padding.

    No dict: fairseq and PyTorch leave it where it is.
    """

    src_tokens: Tensor
    prev_output_tokens: Tensor | None
    """None: a language model's batch."""


class Collater:
    """A collater of fairseq, whose batches have their Paddings as well.

    Args:
        collate: samples -> batch.
        padding_idx: the padding token.
    """

    def __init__(self, collate: Callable[[Sequence[Any]], dict[str, Any]], padding_idx: int):
        self._collate, self._padding_idx = collate, padding_idx

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        batch = self._collate(samples)
        if batch:
            given = (batch["net_input"].get(name) for name in ("src_tokens", "prev_output_tokens"))
            batch[BATCH] = Paddings(
                *(None if tokens is None else tokens.eq(self._padding_idx) for tokens in given)
            )
        return batch
