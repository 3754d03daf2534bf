"""Where memory is free: the gaps of a range of bytes, which is handed out and given back in any
order."""

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
        # (start, end); changed in one step, whatever interrupts
        self._gaps = [(0, size // alignment * alignment)]

    def __iter__(self):
        """(offset, bytes) of each, in order."""
        return iter([(start, end - start) for start, end in self._gaps])

    def take(self, size: int) -> int | None:
        """The offset of `size` bytes in the smallest gap that has them, the lowest of these; None:
        there is none.

        `size` is above 0; best fit leaves the large gaps whole.
        """
        size = self._aligned(size)
        fitting = (
            (end - start, number)
            for number, (start, end) in enumerate(self._gaps)
            if end - start >= size
        )
        length, number = min(fitting, default=(0, None))
        if number is None:
            return None
        start, end = self._gaps[number]
        self._gaps[number : number + 1] = [(start + size, end)] if length > size else []
        return start

    def give_back(self, start: int, size: int) -> None:
        """What was taken there is free again."""
        end = start + self._aligned(size)
        first = last = bisect_left(self._gaps, (start, end))
        if first and self._gaps[first - 1][1] == start:
            first -= 1
            start = self._gaps[first][0]
        if last < len(self._gaps) and self._gaps[last][0] == end:
            end = self._gaps[last][1]
            last += 1
        self._gaps[first:last] = [(start, end)]

    def _aligned(self, size: int) -> int:
        return -(-size // self._alignment) * self._alignment
