"""The save that goes on beside training."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Protocol

from infinity.checkpoint.save import Progress
from infinity.device.lane import DONE, Lane, LaneTicket, Ticket
from infinity.engine.build import Parts
from infinity.errors import CheckpointError

log = logging.getLogger("infinity")


class Write(Protocol):
    """Writes a checkpoint; calls ``kept`` with the index of each unit that may change from then on."""

    def __call__(self, progress: Progress, kept: Callable[[int], None]) -> object: ...


class Saving:
    """At most one save under way, with the units whose update must wait for it.

    Forward and backward do not change what is saved of a unit, so they go on. Whoever else would waits in ``settle``.
    An error of the save is no error of training: it is raised once, by ``check``.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lane: Lane | None = None
        self._under_way: LaneTicket | None = None
        self._path = ""
        self._held: dict[int, LaneTicket] = {}
        self._given_up = False

    def begin(self, path: str, units: Iterable[int], progress: Progress | None, write: Write) -> None:
        """Lets ``write`` run on a thread of its own; the save before must be over."""
        if self._lane is None:
            self._lane = Lane("save")
            self._parts.lanes.append(self._lane)
        self._path, self._held = path, {unit: LaneTicket() for unit in units}
        self._under_way = self._lane.submit(lambda: self._run(progress, write))

    def held(self, unit: int) -> Ticket:
        """Done when the save, if there is one, does not need the unit's states as they are any more."""
        return self._held.get(unit, DONE)

    def settle(self) -> None:
        """Waits for the save under way, then as ``Parts.settle``."""
        self._wait()
        self._parts.settle()

    def check(self) -> None:
        """Raises, once, why the save that is over failed."""
        over = self._under_way
        if over is None or not over.done():
            return
        self._under_way = None
        try:
            over.wait()
        except Exception as error:
            raise CheckpointError(
                f"{self._path} could not be saved while training went on: {error}. Training may go on"
            ) from error

    def end(self) -> None:
        """Waits for the save under way before the engine goes; an interrupt, before or meanwhile, gives it up."""
        self._given_up = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        try:
            self._wait()
        except KeyboardInterrupt:
            self._given_up = True
            self._wait()
            raise
        finally:
            if self._given_up:
                self._under_way = None

    def _wait(self) -> None:
        """The error, if there is one, is for ``check``."""
        if self._under_way is not None:
            self._under_way.comes_within(None)

    def _run(self, progress: Progress | None, write: Write) -> None:
        def told(done: int, nbytes: int) -> None:
            if self._given_up:
                raise CheckpointError("it was given up, because the engine was ended by an interrupt")
            if progress is not None:
                progress(done, nbytes)

        try:
            write(told, self._keep)
        except BaseException as error:
            log.warning("checkpoint %s was not completed: %s", self._path, error)
            raise
        finally:
            for unit in tuple(self._held):
                self._keep(unit)

    def _keep(self, unit: int) -> None:
        self._held.pop(unit).resolve()
