"""Brings each unit's parameters to the device just before use."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

import torch

from infinity.device.lane import Lane, Ticket
from infinity.errors import CapacityError, ScheduleError
from infinity.memory.arena import Slab, SlabPool
from infinity.obs.ledger import Ledger
from infinity.shard.partition import Unit
from infinity.shard.schedule import Schedule
from infinity.storage.store import Store


class Phase(Enum):
    """What a unit is needed for; inference is not part of the training step's order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


@dataclass
class Resident:
    """A unit that has a slab: its bytes are there once ``arrived`` is done; ``lent`` counts its current users."""

    slab: Slab
    arrived: Ticket
    lent: int = 0


class ParamStream:
    """Owner of one fact: whether a unit is on the device.

    ``lend`` makes units usable, ``release`` ends the use. Between the two their slab cannot move. Parameters are clean
    during forward and backward, so giving a slab to another unit writes nothing; the unit whose next use is furthest
    away loses its slab first. Units in no ``slab_bytes`` have a home that the device can address: they are used there.

    After ``invalidate`` a unit is usable again only when the updater's ticket for it is done, however long that takes.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        store: Store,
        pools: dict[int, SlabPool],
        slab_bytes: dict[int, int],
        lane: Lane,
        ledger: Ledger,
        prefetch_units: int | None = None,
    ) -> None:
        self._units = units
        self._store = store
        self._pools = pools
        self._slab_bytes = slab_bytes
        self._lane = lane
        self._ledger = ledger
        self._residents: dict[int, Resident] = {}
        self._updates: dict[int, Ticket] = {}
        order = [unit.index for unit in units]
        self._training = Schedule(order)
        self._inference = Schedule(order)
        slabs = sum(pool.count for pool in pools.values())
        self._look_ahead = slabs if prefetch_units is None else min(slabs, prefetch_units)

    def lend(self, indices: Iterable[int], phase: Phase) -> None:
        """Makes units usable; blocks until their bytes are there."""
        indices = tuple(indices)
        schedule = self._inference if phase is Phase.INFERENCE else self._training
        if not self._pools:
            for index in indices:
                self._await_update(index)
            return
        taken = []
        try:
            for index in indices:
                schedule.use(index, backward=phase is Phase.BACKWARD)
                if index not in self._slab_bytes:
                    continue
                resident = self._residents.get(index)
                if resident is None:
                    start = time.perf_counter()
                    slab = self._slab_for(index, schedule, demanded=True)  # which a late read may still be filling
                    self._ledger.stalled("budget", time.perf_counter() - start)
                    resident = self._fetch(index, slab)
                resident.lent += 1
                taken.append(index)
            self._prefetch(schedule)
            for index in indices:
                (self._arrive if index in self._slab_bytes else self._await_update)(index)
        except BaseException:
            self.release(taken)
            raise

    def release(self, indices: Iterable[int]) -> None:
        """Ends one use of each unit."""
        for index in indices:
            if index in self._slab_bytes:
                self._residents[index].lent -= 1

    def flat(self, index: int) -> torch.Tensor:
        """The lent unit's flat buffer, 1-D in the compute dtype."""
        layout = self._units[index].layout
        if index not in self._slab_bytes:
            home = self._store.resident(index)
            assert home is not None
            return home.view(layout.dtype)
        return self._residents[index].slab.memory[: layout.nbytes()].view(layout.dtype)

    def forward_order(self) -> list[int]:
        """Every unit once, in the order in which the next forward will need it."""
        return list(dict.fromkeys([*self._training.order(), *(unit.index for unit in self._units)]))

    def begin_inference(self) -> None:
        """Starts a new pass outside training."""
        self._inference.end_step()

    def invalidate(self, updates: dict[int, Ticket]) -> None:
        """Takes the updater's tickets: each unit's bytes at home change now, so copies elsewhere are dropped."""
        self._updates |= updates
        for index in updates:
            self._forget(index)
        self._training.end_step()
        if self._training.known:
            self._prefetch(self._training)

    def begin_update(self, index: int, update: Ticket) -> None:
        """Takes the ticket of one unit that is updated before the step's end; its copies elsewhere are dropped."""
        self._updates[index] = update
        self._forget(index)

    def settle(self) -> None:
        """Waits for every update and every read under way."""
        for index in tuple(self._updates):
            self._await_update(index)
        for resident in self._residents.values():
            resident.arrived.wait()

    def drop_all(self) -> None:
        """Forgets every copy that is not in use, so that the next lend reads from home."""
        for index in [index for index, resident in self._residents.items() if not resident.lent]:
            self._drop(index)

    def _arrive(self, index: int) -> None:
        arrived = self._residents[index].arrived
        if not arrived.done():
            start = time.perf_counter()
            try:
                arrived.wait()
            finally:
                self._ledger.stalled("parameter_read", time.perf_counter() - start)
        else:
            arrived.wait()

    def _await_update(self, index: int) -> None:
        update = self._updates.get(index)
        if update is None:
            return
        start = time.perf_counter()
        update.wait()
        self._ledger.stalled("optimizer", time.perf_counter() - start)
        del self._updates[index]

    def _prefetch(self, schedule: Schedule) -> None:
        seen: set[int] = set()
        full: set[int] = set()  # slab sizes of which every slab holds a unit that is needed sooner
        upcoming = (index for index in schedule.upcoming() if index in self._slab_bytes)
        for index in islice(upcoming, 2 * self._look_ahead):
            if index in seen:
                continue
            seen.add(index)
            if len(seen) > self._look_ahead or len(full) == len(self._pools):
                return
            size = self._slab_bytes[index]
            if index in self._residents or size in full:
                continue
            slab = self._slab_for(index, schedule, demanded=False)
            if slab is None:
                full.add(size)
            else:
                self._fetch(index, slab)

    def _slab_for(self, index: int, schedule: Schedule, *, demanded: bool) -> Slab | None:
        pool = self._pools[self._slab_bytes[index]]
        slab = pool.try_take()
        if slab is not None:
            return slab
        idle = [
            other
            for other, resident in self._residents.items()
            if resident.lent == 0 and self._slab_bytes[other] == self._slab_bytes[index]
        ]
        victim = max(idle, key=schedule.next_use, default=None)
        if victim is not None and (demanded or schedule.next_use(victim) > schedule.next_use(index)):
            self._drop(victim)
            return pool.try_take()
        if demanded:
            users = ", ".join(
                f'"{self._units[other].name}"' for other in self._residents if self._residents[other].lent
            )
            raise CapacityError(
                f'device memory: unit "{self._units[index].name}" is needed while {users} are in use and hold every '
                f"slab of {pool.nbytes} bytes. Raise infinity.slabs, with infinity.device_memory by {pool.nbytes} bytes"
            )
        return None

    def _forget(self, index: int) -> None:
        resident = self._residents.get(index)
        if resident is None:
            return
        if resident.lent:
            raise ScheduleError(f'a step came while unit "{self._units[index].name}" was still computing')
        self._drop(index)

    def _drop(self, index: int) -> None:
        resident = self._residents.pop(index)
        self._pools[self._slab_bytes[index]].put(resident.slab, None if resident.arrived.done() else resident.arrived)

    def _fetch(self, index: int, slab: Slab | None) -> Resident:
        assert slab is not None
        resident = Resident(slab, self._read(index, slab.memory[: self._units[index].layout.nbytes()]))
        self._residents[index] = resident
        return resident

    def _read(self, index: int, into: torch.Tensor) -> Ticket:
        """Fills ``into`` from the unit's home, behind the update of it that may be under way."""
        update = self._updates.get(index)
        if update is not None and update.done():
            update.wait()
            del self._updates[index]
            update = None
        if update is None and self._store.is_settled(index):
            return self._store.read(index, 0, into)
        return self._lane.submit(lambda: self._read_after(update, index, into))

    def _read_after(self, update: Ticket | None, index: int, into: torch.Tensor) -> Ticket:
        if update is not None:
            update.wait()
        return self._store.read(index, 0, into)
