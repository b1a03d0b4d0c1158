"""Peak memory of this process, sampled while it runs."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType


def status_bytes(field: str) -> int:
    """A ``kB`` field of /proc/self/status in bytes, or 0 where the kernel does not have it."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) << 10
    return 0


class AnonymousPeak:
    """Largest RssAnon seen while the context is open; the kernel keeps a high-water mark of the whole RSS only.

    A peak shorter than the interval can be missed. Anonymous memory leaves out mapped libraries and files.
    """

    def __init__(self, interval_seconds: float = 0.02) -> None:
        self._interval_seconds = interval_seconds
        self._closed = threading.Event()
        self._peak = status_bytes("RssAnon")
        self._thread = threading.Thread(target=self._sample, name="infinity-rss", daemon=True)

    @property
    def peak_bytes(self) -> int:
        """The peak so far."""
        return max(self._peak, status_bytes("RssAnon"))

    def _sample(self) -> None:
        while not self._closed.wait(self._interval_seconds):
            with suppress(MemoryError):  # whoever does the work says so; this is one sample less
                self._peak = max(self._peak, status_bytes("RssAnon"))

    def __enter__(self) -> AnonymousPeak:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()
