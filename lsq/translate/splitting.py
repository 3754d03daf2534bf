"""A line of several sentences, cut at their ends."""

import re

END = re.compile(r"(?<![.!?…])[.!?…]+[\"'”’»)\]]*\s+|[。！？]+[”’」』）]*\s*")
"""A full stop or the like with the quotes and brackets that it closes: before a space, but for scripts without them.

A row of full stops is looked at once, from its first: looked at from each, a million of them would take hours."""


def sentences(line: str) -> list[str]:
    """The sentences of a line, without the spaces around them; joined by spaces they are the line again, or nearly so.

    Abbreviations count as ends of sentences, too: it is for lines that are too long as they are.
    """
    starts = [0, *(found.end() for found in END.finditer(line))]
    cut = (line[start:end].strip() for start, end in zip(starts, [*starts[1:], len(line)], strict=True))
    return [sentence for sentence in cut if sentence]
