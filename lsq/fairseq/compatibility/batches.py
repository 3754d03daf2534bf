"""Sentences that fit into no batch."""

import numpy
from fairseq.data import data_utils

_fairseq_batches = data_utils.batch_by_size


def batch_by_size(indices, num_tokens_fn, num_tokens_vec=None, max_tokens=None, **options):
    """Takes the place of fairseq's data_utils.batch_by_size, which groups the sentences `indices`
    into batches.

    Raises:
        ValueError: there are none, or one of them alone is beyond `max_tokens`.
    """
    if len(indices) == 0:
        raise ValueError(
            "no sentence is left to make batches of; all are longer than --max-tokens or the model"
            " allows"
        )
    if max_tokens is not None:
        sizes = (
            [num_tokens_fn(index) for index in indices]
            if num_tokens_vec is None
            else num_tokens_vec
        )
        longest = int(numpy.argmax(sizes))
        if sizes[longest] > max_tokens:
            raise ValueError(
                f"sentence {indices[longest]} has {sizes[longest]} tokens, but a batch has at most"
                f" {max_tokens};"
                " raise --max-tokens (--max-tokens-valid where it validates), or leave out"
                " sentences that long"
            )
    return _fairseq_batches(indices, num_tokens_fn, num_tokens_vec, max_tokens, **options)
