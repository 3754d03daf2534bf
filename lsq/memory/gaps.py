"""Where memory is free: the gaps of a range of bytes, which is handed out and given back in any order."""

from bisect import bisect_left

from lsq.memory.buffer import DEFAULT_ALIGNMENT


class Gaps:
    """The free parts of [0, size), neighbours joined.

    Args:
        size: bytes.
        alignment: of what is taken, a power of two.
    """

    def __init__(self, size: int, alignment: int = DEFAULT_ALIGNMENT):
        self._alignment = alignment
        self._starts, self._ends = [0], [size // alignment * alignment]

    def __iter__(self):
        """(offset, bytes) of each, in order."""
        return iter([(start, end - start) for start, end in zip(self._starts, self._ends, strict=True)])

    def take(self, size: int) -> int | None:
        """The offset of `size` bytes in the smallest gap that has them, the lowest of these; None: there is none.

        `size` is above 0; best fit leaves the large gaps whole.
        """
        size = self._aligned(size)
        lengths = ((end - start, start) for start, end in zip(self._starts, self._ends, strict=True))
        _, start = min((one for one in lengths if one[0] >= size), default=(0, None))
        if start is not None:
            number = bisect_left(self._starts, start)
            self._starts[number] += size
            if self._starts[number] == self._ends[number]:
                del self._starts[number], self._ends[number]
        return start

    def give_back(self, start: int, size: int) -> None:
        """What was taken there is free again."""
        end = start + self._aligned(size)
        number = bisect_left(self._starts, start)
        joins_next = number < len(self._starts) and self._starts[number] == end
        if number and self._ends[number - 1] == start:
            if joins_next:
                end = self._ends[number]
                del self._starts[number], self._ends[number]
            self._ends[number - 1] = end
        elif joins_next:
            self._starts[number] = start
        else:
            self._starts.insert(number, start)
            self._ends.insert(number, end)

    def _aligned(self, size: int) -> int:
        return -(-size // self._alignment) * self._alignment
