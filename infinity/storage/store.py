"""Where one kind of state of every unit lives: in memory, or in swap files."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch

from infinity.device.lane import DONE, Ticket
from infinity.memory.arena import Slab, SlabPool
from infinity.obs.ledger import Ledger
from infinity.storage.io_engine import IoEngine, IoTicket
from infinity.storage.swap_file import SwapFile
from infinity.tier import Tier


class Access(Enum):
    """What a lease is for: READ never writes back, WRITE starts from undefined bytes, UPDATE does both."""

    READ = "read"
    WRITE = "write"
    UPDATE = "update"


class Lease(Protocol):
    """Bytes of a store, lent until ``release``."""

    def wait(self) -> torch.Tensor:
        """The bytes as a 1-D uint8 tensor, valid until release."""
        ...

    def release(self) -> None:
        """Ends the loan; what was leased for writing goes back behind the caller's back."""
        ...

    def abandon(self) -> None:
        """Ends the loan after an error: nothing is written back."""
        ...


class Store(Protocol):
    """One kind of state of every unit, addressed by unit and byte range.

    A read begun after a write of the same bytes sees that write, whatever either takes.
    """

    tier: Tier

    def lease(self, unit: int, start: int, stop: int, access: Access) -> Lease:
        """Lends bytes ``start`` to ``stop`` (whole pages) of ``unit``; returns while they are on their way."""
        ...

    def resident(self, unit: int) -> torch.Tensor | None:
        """All bytes of ``unit`` where they can be addressed in place, else None."""
        ...

    def is_settled(self, unit: int) -> bool:
        """Whether a read of ``unit`` would start without waiting for a write."""
        ...

    def read(self, unit: int, start: int, into: torch.Tensor) -> Ticket:
        """Copies bytes from ``start`` on into ``into`` (uint8)."""
        ...

    def write(self, unit: int, start: int, source: torch.Tensor) -> Ticket:
        """Copies ``source`` (uint8) to ``start``; the source must stay unchanged until the ticket is done."""
        ...

    def settle(self) -> None:
        """Waits until every write has reached the store."""
        ...


@dataclass
class MemoryLease:
    """A view of memory that holds the state for good."""

    view: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.view

    def release(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class MemoryStore:
    """State that stays in one place of an arena; leases are views."""

    def __init__(self, tier: Tier, regions: dict[int, torch.Tensor]) -> None:
        self.tier = tier
        self._regions = regions

    def lease(self, unit: int, start: int, stop: int, access: Access) -> Lease:
        return MemoryLease(self._regions[unit][start:stop])

    def resident(self, unit: int) -> torch.Tensor | None:
        return self._regions[unit]

    def is_settled(self, unit: int) -> bool:
        return True

    def read(self, unit: int, start: int, into: torch.Tensor) -> Ticket:
        into.copy_(self._regions[unit][start : start + into.numel()])
        return DONE

    def write(self, unit: int, start: int, source: torch.Tensor) -> Ticket:
        self._regions[unit][start : start + source.numel()].copy_(source)
        return DONE

    def settle(self) -> None:
        pass


@dataclass
class Extent:
    """A page-aligned byte range of a swap file, with the transfers that are under way on it."""

    file: SwapFile
    offset: int
    nbytes: int
    reads: list[tuple[int, int, LinkTicket]] = field(default_factory=list)
    writes: list[tuple[int, int, LinkTicket]] = field(default_factory=list)


class LinkTicket:
    """An I/O ticket that tells the ledger when the transfer began, when it ended."""

    def __init__(self, ticket: IoTicket, ledger: Ledger, link: str) -> None:
        self._ticket = ticket
        self._ledger = ledger
        self._link = link
        self.started = time.perf_counter()
        self._lock = threading.Lock()
        self._open = True

    def done(self) -> bool:
        finished = self._ticket.done()
        if finished:
            self._close()
        return finished

    def wait(self) -> None:
        try:
            self._ticket.wait()
        finally:
            self._close()

    def _close(self) -> None:
        with self._lock:
            if not self._open:
                return
            self._open = False
        self._ledger.end(self._link, self.started, self._ticket.finished_at())


class FileLease:
    """Bytes of a file in a staging slab; a write lease goes back to the file on release, behind the caller."""

    def __init__(self, store: FileStore, pool: SlabPool, slab: Slab, unit: int, start: int, nbytes: int) -> None:
        self._store, self._pool, self._slab = store, pool, slab
        self._unit, self._start = unit, start
        self._bytes = slab.memory[:nbytes]
        self.ticket: Ticket = DONE
        self.dirty = False

    def wait(self) -> torch.Tensor:
        self.ticket.wait()
        return self._bytes

    def release(self) -> None:
        try:
            written = self._store.write(self._unit, self._start, self._bytes) if self.dirty else None
        except BaseException:
            self._pool.put(self._slab)  # a slab that is lost would make its next taker wait for ever
            raise
        self._pool.put(self._slab, written)

    def abandon(self) -> None:
        self._pool.put(self._slab, self.ticket)


class FileStore:
    """State in swap files. Transfers of overlapping bytes keep the order in which they were asked for."""

    tier = Tier.NVME

    def __init__(
        self,
        engine: IoEngine,
        extents: dict[int, Extent],
        ledger: Ledger,
        pool: SlabPool | None,
        names: Mapping[int, str] | None = None,
    ) -> None:
        """``names`` say what an extent holds, by unit."""
        self._engine = engine
        self._extents = extents
        self._names = names or {}
        self._ledger = ledger
        self._pool = pool
        self._lock = threading.Lock()

    def lease(self, unit: int, start: int, stop: int, access: Access) -> FileLease:
        if self._pool is None:
            raise AssertionError("this store was planned without staging slabs")
        slab = self._pool.take()
        lease = FileLease(self, self._pool, slab, unit, start, stop - start)
        lease.dirty = access is not Access.READ
        if access is not Access.WRITE:
            try:
                lease.ticket = self.read(unit, start, slab.memory[: stop - start])
            except BaseException:
                self._pool.put(slab)
                raise
        return lease

    def resident(self, unit: int) -> torch.Tensor | None:
        return None

    def is_settled(self, unit: int) -> bool:
        with self._lock:
            return all(ticket.done() for _, _, ticket in self._extents[unit].writes)

    def read(self, unit: int, start: int, into: torch.Tensor) -> Ticket:
        extent = self._extents[unit]
        self._wait_overlapping(extent.writes, start, start + into.numel())
        self._ledger.begin("nvme_read", into.numel())
        ticket = LinkTicket(self._engine.read(extent.file, extent.offset + start, into), self._ledger, "nvme_read")
        with self._lock:
            extent.reads = _pending(extent.reads)
            extent.reads.append((start, start + into.numel(), ticket))
        return ticket

    def write(self, unit: int, start: int, source: torch.Tensor) -> Ticket:
        extent = self._extents[unit]
        self._wait_overlapping(extent.writes, start, start + source.numel())
        self._wait_overlapping(extent.reads, start, start + source.numel())
        self._ledger.begin("nvme_write", source.numel())
        ticket = LinkTicket(self._engine.write(extent.file, extent.offset + start, source), self._ledger, "nvme_write")
        with self._lock:
            extent.writes.append((start, start + source.numel(), ticket))
        return ticket

    def settle(self) -> None:
        for extent in self._extents.values():
            self._wait_overlapping(extent.writes, 0, extent.nbytes)
            self._wait_overlapping(extent.reads, 0, extent.nbytes)

    def waiting(self) -> list[tuple[str, float]]:
        """Every transfer under way, with when it began on the performance counter."""
        with self._lock:
            pending = [
                (f"{verb} {self._names.get(unit, 'a state')}, bytes {start} to {stop} in {extent.file.path}", ticket)
                for unit, extent in self._extents.items()
                for verb, transfers in (("reading", extent.reads), ("writing", extent.writes))
                for start, stop, ticket in transfers
            ]
        return [(what, ticket.started) for what, ticket in pending if not ticket.done()]

    def _wait_overlapping(self, transfers: list[tuple[int, int, LinkTicket]], start: int, stop: int) -> None:
        with self._lock:
            overlapping = [entry for entry in transfers if entry[0] < stop and start < entry[1]]
        for entry in overlapping:
            entry[2].wait()
        with self._lock:
            for entry in overlapping:
                if entry in transfers:
                    transfers.remove(entry)


def _pending(transfers: Iterable[tuple[int, int, LinkTicket]]) -> list[tuple[int, int, LinkTicket]]:
    return [entry for entry in transfers if not entry[2].done()]


class SplitStore:
    """Some units in memory, the others in files."""

    tier = Tier.NVME

    def __init__(self, near: MemoryStore, near_units: frozenset[int], far: FileStore) -> None:
        self._near, self._near_units, self._far = near, near_units, far

    def _of(self, unit: int) -> Store:
        return self._near if unit in self._near_units else self._far

    def lease(self, unit: int, start: int, stop: int, access: Access) -> Lease:
        return self._of(unit).lease(unit, start, stop, access)

    def resident(self, unit: int) -> torch.Tensor | None:
        return self._of(unit).resident(unit)

    def is_settled(self, unit: int) -> bool:
        return self._of(unit).is_settled(unit)

    def read(self, unit: int, start: int, into: torch.Tensor) -> Ticket:
        return self._of(unit).read(unit, start, into)

    def write(self, unit: int, start: int, source: torch.Tensor) -> Ticket:
        return self._of(unit).write(unit, start, source)

    def settle(self) -> None:
        self._far.settle()
