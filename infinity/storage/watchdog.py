"""Says what has been waiting for too long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

log = logging.getLogger("infinity")

LOOKS = 4
"""How often it looks within one time limit."""


class Waits(Protocol):
    """Something with entries that may hang."""

    def waiting(self) -> list[tuple[str, float]]:
        """What is under way, with when it began on the performance counter."""
        ...


class Watchdog:
    """A thread that logs each transfer or lane entry that takes longer than ``seconds``, again each time that doubles.

    It ends nothing: a disk that hangs cannot be interrupted, but whoever looks at the run then knows which one it is.
    """

    def __init__(self, watched: Sequence[Waits], seconds: float) -> None:
        self._watched, self._seconds = watched, seconds
        self._told: dict[tuple[str, float], float] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="infinity-watchdog", daemon=True)
        self._thread.start()

    def look(self, now: float) -> list[str]:
        """What there is to tell at ``now``, a sentence each."""
        overdue = {}
        for source in self._watched:
            for what, started in source.waiting():
                if now - started >= self._told.get((what, started), self._seconds):
                    overdue[what, started] = now - started
        self._told = {entry: due for entry, due in self._told.items() if entry in overdue or due > now - entry[1]}
        self._told |= {entry: 2 * took for entry, took in overdue.items()}
        return [f"{what}: under way for {took:.0f} s" for (what, _), took in overdue.items()]

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._seconds / LOOKS):
            for sentence in self.look(time.perf_counter()):
                log.warning("%s; infinity.timeout_seconds is %g", sentence, self._seconds)
