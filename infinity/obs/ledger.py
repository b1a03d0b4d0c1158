"""Counts bytes per link, seconds per phase, seconds waited per cause."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Ledger:
    """The engine's counters, all cumulative.

    ``bytes[link]``: payload moved. ``seconds[phase]``: wall time of forward, backward, step, update, of which adam.
    ``stalls[cause]``: seconds the training thread stood still for that cause. ``busy[link]``: seconds during which at
    least one request of the link was under way.
    """

    def __init__(self) -> None:
        self.bytes: defaultdict[str, int] = defaultdict(int)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.stalls: defaultdict[str, float] = defaultdict(float)
        self.busy: defaultdict[str, float] = defaultdict(float)
        self._covered: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def begin(self, link: str, nbytes: int) -> None:
        """Notes that a request of ``nbytes`` was handed to ``link``."""
        with self._lock:
            self.bytes[link] += nbytes

    def end(self, link: str, started: float, finished: float) -> None:
        """Notes when one request of ``link`` was under way, on the clock of ``time.perf_counter``."""
        with self._lock:
            covered = self._covered[link]
            self.busy[link] += max(0.0, finished - max(started, covered))
            self._covered[link] = max(covered, finished)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the block to ``seconds[name]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[name] += time.perf_counter() - start

    def span(self, name: str) -> AbstractContextManager[None]:
        """Says what the block is called; only a ledger that keeps spans cares."""
        return _UNRECORDED

    def stalled(self, cause: str, seconds: float) -> None:
        """Adds time the training thread waited."""
        with self._lock:
            self.stalls[cause] += seconds


_UNRECORDED: AbstractContextManager[None] = nullcontext()
