"""Predicts which unit is needed next from the order seen in the previous step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence


class Schedule:
    """The order of unit uses: recorded in one step, predicted in the next.

    Before the first step has been seen forward is predicted in memory order and backward as the reverse of what
    forward did. A use that was not predicted moves the cursor to the next place where that unit occurs; if there is
    none the prediction is left alone. Nothing here is ever more than a hint: the caller fetches on demand whatever
    was not foreseen.
    """

    def __init__(self, memory_order: Sequence[int]) -> None:
        self._trace: list[int] = []
        self._backward_from: int | None = None
        self._predict(list(memory_order))
        self.known = False

    def _predict(self, order: list[int]) -> None:
        self._order = order
        self._cursor = 0
        self._places: dict[int, list[int]] = {}
        for place, unit in enumerate(order):
            self._places.setdefault(unit, []).append(place)

    def use(self, unit: int, *, backward: bool) -> None:
        """Notes that ``unit`` is used now."""
        if not self.known and backward and self._backward_from is None:
            self._backward_from = len(self._trace)
            self._predict(list(reversed(self._trace)))
        if not backward:
            self._backward_from = None
        self._trace.append(unit)
        if self._cursor < len(self._order) and self._order[self._cursor] == unit:
            self._cursor += 1
            return
        places = self._places.get(unit, [])
        nearest = bisect_left(places, self._cursor)
        if nearest < len(places):
            self._cursor = places[nearest] + 1

    def upcoming(self) -> Iterator[int]:
        """Units predicted for the rest of this step, soonest first, with repetitions."""
        for place in range(self._cursor, len(self._order)):
            yield self._order[place]

    def next_use(self, unit: int) -> float:
        """How many uses away ``unit`` is needed again in this step; infinity if not again."""
        places = self._places.get(unit, [])
        nearest = bisect_left(places, self._cursor)
        return places[nearest] - self._cursor if nearest < len(places) else math.inf

    def order(self) -> list[int]:
        """Units in the order in which a step first needs them: this step's if it has begun, else the prediction."""
        return list(dict.fromkeys(self._trace or self._order))

    def end_step(self) -> None:
        """Makes what was just recorded the prediction."""
        if self._trace:
            self._predict(self._trace)
            self.known = True
        self._trace = []
        self._backward_from = None
