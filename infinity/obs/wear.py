"""Counts what is written to NVMe in a day, which is what wears a disk out."""

from __future__ import annotations

from collections import deque

DAY_SECONDS = 86_400.0
BUCKET_SECONDS = 600.0


class WearMeter:
    """Bytes written in the last 24 hours against a limit; ``limit`` None only counts.

    Counted from the start of the engine: what earlier runs wrote is not known here.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._buckets: deque[tuple[float, int]] = deque()
        self._total = 0
        self._told_until = -1.0

    def note(self, total: int, now: float) -> str | None:
        """Takes the bytes written so far at ``now`` (seconds); a sentence once a day while the limit is exceeded."""
        fresh, self._total = total - self._total, total
        if self._buckets and now - self._buckets[-1][0] < BUCKET_SECONDS:
            self._buckets[-1] = self._buckets[-1][0], self._buckets[-1][1] + fresh
        else:
            self._buckets.append((now, fresh))
        while self._buckets[0][0] <= now - DAY_SECONDS:
            self._buckets.popleft()
        if not self.is_over or now < self._told_until:
            return None
        self._told_until = now + DAY_SECONDS
        return self.sentence(now)

    def sentence(self, now: float) -> str:
        """How much was written, what to do about it."""
        hours = (now - self._buckets[0][0]) / 3600
        return (
            f"{self.last_day} bytes were written to NVMe in the last {hours:.1f} h, more than "
            f"infinity.nvme_writes_per_day ({self.limit}). Keep a state kind in host memory (infinity.placement), "
            "accumulate more micro-batches, or raise the limit"
        )

    @property
    def is_over(self) -> bool:
        """Whether the limit is exceeded."""
        return self.limit is not None and self.last_day > self.limit

    @property
    def last_day(self) -> int:
        """Bytes of the last 24 hours."""
        return sum(nbytes for _, nbytes in self._buckets)
