"""Updates units, soonest needed first, while the caller goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from infinity.device.lane import DONE, CallersLane, Lane, LaneTicket, Ticket
from infinity.errors import ScheduleError
from infinity.obs.ledger import Ledger
from infinity.plan.placement import STREAMED_KINDS, Placement
from infinity.shard.partition import Unit
from infinity.shard.subgroups import subgroups
from infinity.storage.store import Access, Lease, Store
from infinity.tier import StateKind


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of a unit's shard that are updated with the same numbers."""

    start: int
    stop: int
    step: Any


@dataclass(frozen=True)
class UnitUpdate:
    """What one step does to one unit, in one piece at least; elements in no piece stay as they are."""

    unit: Unit
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class SubGroup:
    """The part of a unit that is read, updated, written at a time."""

    unit: Unit
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    is_last: bool = False

    @property
    def covered(self) -> bool:
        """Whether every element is updated, so that nothing of the 16-bit copy has to be kept."""
        return sum(piece.stop - piece.start for piece in self.pieces) == self.stop - self.start


Rule = Callable[[SubGroup, dict[StateKind, torch.Tensor]], None]
"""Updates one sub-group in place, given every kind of state it has as 1-D tensors."""


class Updater:
    """Reads sub-groups ahead, runs the rule on one, writes the ones behind, all on one lane.

    The ring of staging slabs behind the stores bounds what is in flight. A unit's ticket is done when its last
    sub-group has been handed back to its store, from where the next read sees it. A unit is not touched before
    ``held`` of its index is done, which is how a save keeps what it has not written yet.
    """

    def __init__(
        self,
        placement: Placement,
        stores: dict[StateKind, Store],
        rule: Rule,
        subgroup_numel: int,
        read_ahead: int,
        lane: Lane | CallersLane,
        ledger: Ledger,
    ) -> None:
        self._placement = placement
        self._stores = stores
        self.rule = rule
        self._subgroup_numel = subgroup_numel
        self._read_ahead = read_ahead
        self._lane = lane
        self._ledger = ledger
        self.held: Callable[[int], Ticket] = lambda unit: DONE
        self._closed = False
        self._waiting: list[tuple[UnitUpdate, LaneTicket]] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        """Gives up what is under way after the sub-group at hand: all that it changes is about to be taken down."""
        self._closed = True

    def start(self, updates: Sequence[UnitUpdate]) -> dict[int, Ticket]:
        """Begins the updates in the order given, behind those that wait already; returns a ticket per unit."""
        tickets = {update.unit.index: LaneTicket() for update in updates}
        with self._lock:
            self._waiting += [(update, tickets[update.unit.index]) for update in updates]
        self._lane.submit(self._run)
        return dict(tickets)

    def reorder(self, order: Sequence[int]) -> None:
        """Puts the updates that nobody has begun into the order in which their units (by index) are needed."""
        place = {index: number for number, index in enumerate(order)}
        with self._lock:
            self._waiting.sort(key=lambda entry: place[entry[0].unit.index])

    def _run(self) -> None:
        """Makes every update that waits, those that come meanwhile included, with the next reads always under way."""
        window: deque[tuple[SubGroup, dict[StateKind, Lease], LaneTicket]] = deque()
        begun: list[LaneTicket] = []
        with self._ledger.phase("update"):
            try:
                for update, ticket in self._next():
                    begun.append(ticket)
                    held = self.held(update.unit.index)
                    while window and not held.done():
                        self._advance(window)
                    held.wait()
                    for group in self._subgroups(update):
                        if self._closed:
                            raise ScheduleError("the engine was destroyed before this update was made")
                        window.append((group, self._acquire(group), ticket))
                        if len(window) > self._read_ahead:
                            self._advance(window)
                while window:
                    self._advance(window)
            except BaseException as error:
                for _, leases, _ in window:
                    _abandon(leases)
                with self._lock:
                    begun += [ticket for _, ticket in self._waiting]
                    self._waiting = []
                for ticket in begun:
                    if not ticket.done():
                        ticket.fail(error)
                raise

    def _next(self) -> Iterator[tuple[UnitUpdate, LaneTicket]]:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                free = (place for place, (update, _) in enumerate(self._waiting) if self._is_free(update))
                entry = self._waiting.pop(next(free, 0))
            yield entry

    def _is_free(self, update: UnitUpdate) -> bool:
        return self.held(update.unit.index).done()

    def _advance(self, window: deque[tuple[SubGroup, dict[StateKind, Lease], LaneTicket]]) -> None:
        group, leases, ticket = window[0]
        self._compute(group, leases)
        for kind in tuple(leases):
            leases.pop(kind).release()  # one at a time: after an error the others are still there to be abandoned
        window.popleft()
        if group.is_last:
            ticket.resolve()

    def _subgroups(self, update: UnitUpdate) -> list[SubGroup]:
        found = []
        for start, stop in subgroups(update.unit.layout.numel, self._subgroup_numel):
            pieces = tuple(
                Piece(max(piece.start, start) - start, min(piece.stop, stop) - start, piece.step)
                for piece in update.pieces
                if piece.start < stop and start < piece.stop
            )
            if pieces:
                found.append(SubGroup(update.unit, start, stop, pieces))
        found[-1] = replace(found[-1], is_last=True)
        return found

    def _acquire(self, group: SubGroup) -> dict[StateKind, Lease]:
        access = {kind: Access.UPDATE for kind in STREAMED_KINDS if self._placement.has(kind, group.unit)}
        access[StateKind.GRAD] = Access.READ
        if StateKind.MASTER in access and group.covered:
            access[StateKind.PARAM] = Access.WRITE
        leases: dict[StateKind, Lease] = {}
        try:
            for kind, how in access.items():
                itemsize = self._placement.dtype(kind, group.unit).itemsize
                leases[kind] = self._stores[kind].lease(
                    group.unit.index, group.start * itemsize, group.stop * itemsize, how
                )
        except BaseException:
            _abandon(leases)
            raise
        return leases

    def _compute(self, group: SubGroup, leases: dict[StateKind, Lease]) -> None:
        values = {kind: lease.wait().view(self._placement.dtype(kind, group.unit)) for kind, lease in leases.items()}
        with self._ledger.phase("adam"):
            self.rule(group, values)


def _abandon(leases: dict[StateKind, Lease]) -> None:
    for lease in leases.values():
        lease.abandon()


def pieces_of(unit: Unit, deposited: Sequence[int], step_of: Callable[[int], Any]) -> tuple[Piece, ...]:
    """Merges neighbouring slots that have a gradient and the same numbers; gaps between them go along (all zero)."""
    pieces: list[Piece] = []
    slots = unit.layout.slots
    for number, slot in enumerate(slots):
        if not deposited[number] or slot.numel == 0:
            continue
        stop = slots[number + 1].offset if number + 1 < len(slots) else unit.layout.numel
        step = step_of(number)
        if pieces and pieces[-1].stop == slot.offset and pieces[-1].step == step:
            pieces[-1] = Piece(pieces[-1].start, stop, step)
        else:
            pieces.append(Piece(slot.offset, stop, step))
    return tuple(pieces)
