"""Hands out pieces of any size from one range of bytes."""

from __future__ import annotations

from bisect import bisect_left, insort

from infinity.tier import PAGE_BYTES, round_up


class Heap:
    """First fit, lowest address first, in whole pages; neighbours that are free are one piece again.

    What is taken and given back in opposite order, as unit inputs are, leaves no holes. ``peak`` is the end of the
    highest byte that was ever in use.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self.peak = 0
        self._taken: dict[int, int] = {}
        self._order: list[int] = []

    def take(self, nbytes: int) -> int | None:
        """The first byte of a free piece, or None if there is none below ``limit``."""
        nbytes = round_up(max(nbytes, 1), PAGE_BYTES)
        end = 0
        for start in self._order:
            if start - end >= nbytes:
                break
            end = start + self._taken[start]
        if end + nbytes > self.limit:
            return None
        self._taken[end] = nbytes
        insort(self._order, end)
        self.in_use += nbytes
        self.peak = max(self.peak, end + nbytes)
        return end

    def give(self, start: int) -> None:
        """Ends the use of the piece that begins at ``start``."""
        self.in_use -= self._taken.pop(start)
        del self._order[bisect_left(self._order, start)]
