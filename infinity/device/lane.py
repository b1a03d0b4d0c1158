"""Ordered asynchronous queues of work on the host."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol


class Ticket(Protocol):
    """The completion of one asynchronous entry; whoever uses the result waits on it."""

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        ...

    def wait(self) -> Any:
        """Blocks until complete; raises what the work raised, every time it is called."""
        ...


class Done:
    """A ticket of work that is complete already."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


DONE = Done()


class LaneTicket:
    """The completion of one lane entry; ``wait`` gives the work's result, waiting on in turn if that is a ticket."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        if not self._event.is_set():
            return False
        inner = getattr(self._result, "done", None)
        return bool(inner()) if inner is not None else True

    def wait(self) -> Any:
        self._event.wait()
        if self._error is not None:
            raise self._error
        inner = getattr(self._result, "wait", None)
        return inner() if inner is not None else self._result

    def comes_within(self, seconds: float | None) -> bool:
        """Waits for the work itself, not for what it may have given to wait for, however long for None; whether it is
        over."""
        return self._event.wait(seconds)

    def resolve(self, result: Any = None) -> None:
        """Marks the entry complete."""
        self._result = result
        self._event.set()

    def fail(self, error: BaseException) -> None:
        """Marks the entry failed; every wait raises ``error``."""
        self._error = error
        self._event.set()


class Lane:
    """One thread that runs what it is given, in order. ``delay`` is called before each entry (tests inject jitter)."""

    def __init__(self, name: str, delay: Callable[[], None] | None = None) -> None:
        self.name = name
        self._delay = delay
        self._busy_since: float | None = None
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], LaneTicket] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"infinity-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> LaneTicket:
        """Queues ``work`` behind everything submitted before."""
        ticket = LaneTicket()
        self._queue.put((work, ticket))
        return ticket

    def close(self) -> None:
        """Runs what is queued, then ends the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def waiting(self) -> list[tuple[str, float]]:
        """The entry at hand, if there is one, with when it began on the performance counter."""
        since = self._busy_since
        return [] if since is None else [(f"lane {self.name}", since)]

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            work, ticket = entry
            self._busy_since = time.perf_counter()
            try:
                if self._delay is not None:
                    self._delay()
                ticket.resolve(work())
            except BaseException as error:  # handed to whoever waits on the ticket
                ticket.fail(error)
            self._busy_since = None
            del work, ticket, entry


class CallersLane:
    """A lane without a thread: whoever submits work does it, before ``submit`` returns."""

    def __init__(self, delay: Callable[[], None] | None = None) -> None:
        self._delay = delay

    def submit(self, work: Callable[[], Any]) -> LaneTicket:
        """Runs ``work``; its errors are for whoever waits on the ticket, an interrupt is for the caller."""
        ticket = LaneTicket()
        try:
            if self._delay is not None:
                self._delay()
            ticket.resolve(work())
        except Exception as error:
            ticket.fail(error)
        return ticket

    def waiting(self) -> list[tuple[str, float]]:
        """Nothing: its entries are the caller's own."""
        return []

    def close(self) -> None:
        """There is nothing to end."""
