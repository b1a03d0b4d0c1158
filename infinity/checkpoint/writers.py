"""Threads that write at once, so that the disk has the next write at hand when one is over."""

from __future__ import annotations

from collections.abc import Callable

from infinity.device.lane import Lane, LaneTicket


class Writers:
    """Lanes that take turns."""

    def __init__(self, count: int) -> None:
        self._lanes = [Lane(f"checkpoint-{number}") for number in range(count)]
        self._newest: dict[int, LaneTicket] = {}
        self._turn = 0

    def submit(self, work: Callable[[], None]) -> LaneTicket:
        """Queues ``work``; it may be done before what was queued before it."""
        self._turn = (self._turn + 1) % len(self._lanes)
        ticket = self._newest[self._turn] = self._lanes[self._turn].submit(work)
        return ticket

    def after(self, work: Callable[[], None]) -> LaneTicket:
        """Queues ``work`` behind everything that was queued before, whether that succeeds or not."""
        others = [ticket for turn, ticket in self._newest.items() if turn]

        def run() -> None:
            for ticket in others:
                ticket.comes_within(None)
            work()

        return self._lanes[0].submit(run)

    def close(self) -> None:
        """Ends the threads when all is done."""
        for lane in self._lanes:
            lane.close()
