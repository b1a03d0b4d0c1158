"""Records when each lane was busy, for a trace viewer."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from infinity.obs.ledger import Ledger


@dataclass(frozen=True)
class Span:
    """``name`` was under way in ``lane`` from ``start`` to ``stop``, on the clock of ``time.perf_counter``."""

    lane: str
    name: str
    start: float
    stop: float


class TracedLedger(Ledger):
    """A ledger that also keeps every span; memory grows with the steps, so it is for short runs."""

    def __init__(self) -> None:
        super().__init__()
        self._spans: list[Span] = []

    @property
    def spans(self) -> list[Span]:
        """All so far, in the order in which they ended."""
        return list(self._spans)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self.span(name), super().phase(name):
            yield

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._recorded(threading.current_thread().name, name)

    def end(self, link: str, started: float, finished: float) -> None:
        self._spans.append(Span(link, link, started, finished))
        super().end(link, started, finished)

    def stalled(self, cause: str, seconds: float) -> None:
        now = time.perf_counter()
        self._spans.append(Span("waits", cause, now - seconds, now))
        super().stalled(cause, seconds)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Everything as a Chrome trace: open it in chrome://tracing or ui.perfetto.dev."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": chrome_events(self.spans), "displayTimeUnit": "ms"}, file)

    @contextmanager
    def _recorded(self, lane: str, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spans.append(Span(lane, name, start, time.perf_counter()))


def chrome_events(spans: list[Span]) -> list[dict[str, object]]:
    """Complete events in microseconds, one row per lane; a lane whose spans overlap without nesting gets more rows."""
    rows: dict[tuple[str, int], int] = {}
    open_until: dict[str, list[list[float]]] = {}
    events: list[dict[str, object]] = []
    for span in sorted(spans, key=lambda each: (each.start, -each.stop)):
        stacks = open_until.setdefault(span.lane, [])
        place = _row(stacks, span)
        row = rows.setdefault((span.lane, place), len(rows))
        events.append(
            {"ph": "X", "pid": 0, "tid": row, "name": span.name, "cat": span.lane,
             "ts": span.start * 1e6, "dur": (span.stop - span.start) * 1e6}
        )  # fmt: skip
    names = [
        {
            "ph": "M",
            "pid": 0,
            "tid": row,
            "name": "thread_name",
            "args": {"name": lane if not place else f"{lane} {place + 1}"},
        }
        for (lane, place), row in rows.items()
    ]
    return [*names, *events]


def _row(stacks: list[list[float]], span: Span) -> int:
    """The first row in which ``span`` follows or nests in what is there."""
    for place, stack in enumerate(stacks):
        while stack and stack[-1] <= span.start:
            stack.pop()
        if not stack or span.stop <= stack[-1]:
            stack.append(span.stop)
            return place
    stacks.append([span.stop])
    return len(stacks) - 1
