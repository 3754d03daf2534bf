"""Words that would repeat an n-gram (Paulus et al. 2018, section 2.5). R rows, T words so far."""

from torch import Tensor

NONE = -1
"""In place of a word, where a row has fewer than others."""


def repeating(history: Tensor, size: int) -> Tensor:
    """The words after which a row would have an n-gram twice.

    Args:
        history: int64 [R, T], the words of each row behind its start, which belongs to no n-gram.
        size: n, at least 1.

    Returns:
        int64 [R, W], filled with NONE; W: as many as the row with the most has.
    """
    length = history.shape[1]
    if length < size:
        return history.new_empty(len(history), 0)
    last = history[:, length - size + 1 :]  # the n - 1 words that the next one would complete
    before = history[:, :-1].unfold(1, size - 1, 1) if size > 1 else history[:, :, None][:, :, :0]
    repeats = (before == last[:, None]).all(2)
    words = history[:, size - 1 :].masked_fill(~repeats, NONE)
    most = int(repeats.sum(1).max())
    return words.sort(1, descending=True).values[:, :most]
