"""A line that is too long, cut at the ends of its sentences, and a sentence between its words."""

import math
import re
from collections.abc import Callable, Iterator, Sequence

END = re.compile(r"(?<![.!?…])[.!?…]+[\"'”’»)\]]*\s+|[。！？]+[”’」』）]*\s*")
"""A full stop or the like with the quotes and brackets that it closes: before a space, but for
scripts without them.

A row of full stops is looked at once, from its first: looked at from each, a million of them would
    take hours.
"""


def sentences(line: str) -> list[str]:
    """The sentences of a line, without the spaces around them; joined by spaces they are the line
    again, or nearly so.

    Abbreviations count as ends of sentences, too: it is for lines that are too long as they are.
    """
    starts = [0, *(found.end() for found in END.finditer(line))]
    cut = (
        line[start:end].strip() for start, end in zip(starts, [*starts[1:], len(line)], strict=True)
    )
    return [sentence for sentence in cut if sentence]


def pieces(
    words: Sequence[int], longest: int, begins: Callable[[int], bool]
) -> Iterator[Sequence[int]]:
    """Cut a sentence into pieces of like length, of `longest` subwords at most.

    Args:
        begins: whether a subword begins a word of the text: a cut comes before such a one, where
            there is any.
    """
    start = 0
    while (left := len(words) - start) > longest:
        end = start + math.ceil(left / math.ceil(left / longest))
        end = next((place for place in range(end, start, -1) if begins(words[place])), end)
        yield words[start:end]
        start = end
    yield words[start:]
