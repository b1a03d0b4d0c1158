"""Activation files that know a checksum of every page they wrote."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from infinity.device.lane import Ticket
from infinity.obs.ledger import Ledger
from infinity.storage.activation_file import ActivationFile, FilePiece
from infinity.storage.io_engine import IoEngine
from infinity.storage.swap_file import SwapFile
from infinity.storage.verified_store import EMPTY_PAGE, PageRecord, VerifiedTicket, checksums
from infinity.tier import PAGE_BYTES


class VerifiedActivationFile(ActivationFile):
    """Compares every page that is read with the checksum of what was written there last, as ``VerifiedFileStore``.

    Transfers are whole pages. The records grow with the files, 12 bytes a page, outside of the budgets.
    """

    def __init__(self, engine: IoEngine, files: Sequence[SwapFile], room: int | None, ledger: Ledger) -> None:
        super().__init__(engine, files, room, ledger)
        empty = np.zeros(0, dtype=np.uint32)
        self._records = [PageRecord("the input of a unit", empty, empty.copy(), empty.copy()) for _ in files]
        self._lock = threading.Lock()

    def write(self, piece: FilePiece, source: torch.Tensor) -> Ticket:
        sums = checksums(source)
        record, first = self._records[piece.disk], piece.start // PAGE_BYTES
        pages = slice(first, first + len(sums))
        ticket = super().write(piece, source)
        with self._lock:
            _grow(record, first + len(sums))
            record.before[pages] = record.now[pages]
            record.now[pages] = sums
            record.generation[pages] += 1
        return ticket

    def read(self, piece: FilePiece, into: torch.Tensor) -> Ticket:
        ticket = super().read(piece, into)
        record, first = self._records[piece.disk], piece.start // PAGE_BYTES
        pages = slice(first, first + -(-into.numel() // PAGE_BYTES))
        with self._lock:
            expected = PageRecord(
                f"{record.what} ({piece.nbytes} bytes)",
                record.now[pages].copy(),
                record.before[pages].copy(),
                record.generation[pages].copy(),
            )
        return VerifiedTicket(ticket, into, expected, self._files[piece.disk].path, piece.start)


def _grow(record: PageRecord, pages: int) -> None:
    """Makes room for so many pages; twice as many as there were, so that growing step by step costs no more."""
    if pages <= len(record.now):
        return
    more = max(pages, 2 * len(record.now)) - len(record.now)
    empty = np.full(more, EMPTY_PAGE, dtype=np.uint32)
    record.now, record.before = np.concatenate((record.now, empty)), np.concatenate((record.before, empty))
    record.generation = np.concatenate((record.generation, np.zeros(more, dtype=np.uint32)))
