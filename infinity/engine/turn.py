"""Lets several micro-batches run in turn, one unit call each."""

from __future__ import annotations

import threading
from typing import Any

import torch

from infinity.errors import InfinityError


class Baton:
    """The right to run, handed round among ``count`` threads in order."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._running = list(range(count))
        self._holder = 0
        self._changed = threading.Condition()
        self.failure: BaseException | None = None
        self._changed_by: dict[tuple[int, str], int] = {}

    def changes(self, runner: int, attribute: tuple[int, str]) -> bool:
        """Notes that a runner changed an object's attribute; whether it is the only one."""
        return self._changed_by.setdefault(attribute, runner) == runner

    def take(self, runner: int) -> None:
        """Waits until it is this runner's turn; raises if another one failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or self._holder == runner)
            if self.failure is not None:
                raise Abandoned

    def pass_on(self, runner: int) -> None:
        """Lets the next runner run."""
        with self._changed:
            self._holder = self._after(runner)
            self._changed.notify_all()

    def leave(self, runner: int, failure: BaseException | None) -> None:
        """Takes a runner that is done, or failed, out of the round."""
        with self._changed:
            following = self._after(runner)
            self._running.remove(runner)
            if failure is not None and not isinstance(failure, Abandoned):
                self.failure = self.failure or failure
            if self._holder == runner:
                self._holder = following
            self._changed.notify_all()

    def _after(self, runner: int) -> int:
        place = self._running.index(runner)
        return self._running[(place + 1) % len(self._running)]


class Abandoned(InfinityError):
    """Another micro-batch failed, so this one was given up."""


class Turn:
    """One micro-batch's part in the round; ``call`` is its call of the whole model."""

    def __init__(self, baton: Baton, number: int, anchor: torch.Tensor) -> None:
        self.call: Any = None
        self._baton = baton
        self._number = number
        self._anchor = anchor

    def begin(self) -> None:
        """Waits for the first turn; places this micro-batch's nodes a little above the next one's."""
        self._baton.take(self._number)
        self._skip(self._baton.count - 1 - self._number)

    def changes(self, owner: object, name: str) -> bool:
        """Notes that this micro-batch changed an attribute; whether no other one did, which might see the change."""
        return self._baton.changes(self._number, (id(owner), name))

    def before_unit(self) -> None:
        """Lets every other micro-batch come as far as this one."""
        self._baton.pass_on(self._number)
        self._baton.take(self._number)
        self._skip(self._baton.count)

    def after_unit(self) -> None:
        """Places whatever follows above the unit's node of every micro-batch."""
        self._skip(self._baton.count)

    def _skip(self, count: int) -> None:
        """Uses up sequence numbers, which autograd gives out per thread, one per node."""
        for _ in range(count):
            self._anchor.view_as(self._anchor)
