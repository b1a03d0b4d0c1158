"""A file store that knows a checksum of every page it wrote."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from infinity.device.lane import Ticket
from infinity.errors import StorageError
from infinity.memory.arena import SlabPool
from infinity.obs.ledger import Ledger
from infinity.storage.io_engine import IoEngine
from infinity.storage.store import Extent, FileStore
from infinity.tier import PAGE_BYTES

Checksums = npt.NDArray[np.uint32]

EMPTY_PAGE = zlib.crc32(bytes(PAGE_BYTES))
"""Reserved space reads as zeros."""


@dataclass
class PageRecord:
    """What an extent ought to hold: CRC-32 of each page, that of what the page held before, how often it was written.

    ``what`` names the state: kind, unit, dtype, elements.
    """

    what: str
    now: Checksums
    before: Checksums
    generation: npt.NDArray[np.uint32]


class VerifiedFileStore(FileStore):
    """Compares every page that is read with the checksum of what was written there last.

    A page that does not fit is told apart: stale (it holds what was there before the last write), torn (part of one
    request is new, part stale) or damaged. The records are in memory, 12 bytes a page, outside of the budgets.
    """

    def __init__(
        self,
        engine: IoEngine,
        extents: dict[int, Extent],
        ledger: Ledger,
        pool: SlabPool | None,
        names: Mapping[int, str],
    ) -> None:
        super().__init__(engine, extents, ledger, pool, names)
        self._records = {}
        for unit, extent in extents.items():
            pages = -(-extent.nbytes // PAGE_BYTES)
            empty = np.full(pages, EMPTY_PAGE, dtype=np.uint32)
            self._records[unit] = PageRecord(names[unit], empty, empty.copy(), np.zeros(pages, dtype=np.uint32))

    def read(self, unit: int, start: int, into: torch.Tensor) -> Ticket:
        ticket = super().read(unit, start, into)
        record, first = self._records[unit], start // PAGE_BYTES
        last = first + -(-into.numel() // PAGE_BYTES)
        with self._lock:
            expected = PageRecord(
                record.what,
                record.now[first:last].copy(),
                record.before[first:last].copy(),
                record.generation[first:last].copy(),
            )
        extent = self._extents[unit]
        return VerifiedTicket(ticket, into, expected, extent.file.path, extent.offset + start)

    def write(self, unit: int, start: int, source: torch.Tensor) -> Ticket:
        sums = checksums(source)
        record, first = self._records[unit], start // PAGE_BYTES
        pages = slice(first, first + len(sums))
        ticket = super().write(unit, start, source)
        with self._lock:
            record.before[pages] = record.now[pages]
            record.now[pages] = sums
            record.generation[pages] += 1
        return ticket


class VerifiedTicket:
    """A read whose bytes are checked before the first ``wait`` for it returns."""

    def __init__(self, ticket: Ticket, into: torch.Tensor, expected: PageRecord, path: str, offset: int) -> None:
        self._ticket, self._into, self._expected = ticket, into, expected
        self._path, self._offset = path, offset
        self._lock = threading.Lock()
        self._checked = False

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self) -> None:
        self._ticket.wait()
        with self._lock:
            if not self._checked:
                self._check()
                self._checked = True

    def _check(self) -> None:
        found, expected = checksums(self._into), self._expected
        wrong = np.flatnonzero(found != expected.now)
        if not len(wrong):
            return
        page = int(wrong[0])
        stale = found[wrong] == expected.before[wrong]
        rewritten = (expected.now != expected.before).sum()
        if not stale.all():
            how = f"damaged: {int((~stale).sum())} of {len(found)} pages hold bytes that were never written there"
        elif len(wrong) == rewritten:
            how = f"stale: it holds generation {int(expected.generation[page]) - 1}, the last write of it was lost"
        else:
            how = f"torn: {len(wrong)} of {len(found)} pages are of the generation before"
        raise StorageError(
            f"{expected.what}, generation {int(expected.generation[page])}, is {how}:",
            path=self._path,
            offset=self._offset + page * PAGE_BYTES,
            length=PAGE_BYTES,
            action="Go on from a checkpoint; the disk lost or changed data, so look at dmesg and its health, or at who "
            "else writes to this file",
        )


def checksums(data: torch.Tensor) -> Checksums:
    """The CRC-32 of each page of ``data`` (uint8)."""
    view = memoryview(data.numpy())  # type: ignore[arg-type]
    pages = range(0, len(view), PAGE_BYTES)
    return np.fromiter((zlib.crc32(view[at : at + PAGE_BYTES]) for at in pages), dtype=np.uint32, count=len(pages))
