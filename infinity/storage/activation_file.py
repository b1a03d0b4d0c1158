"""Swap files that grow with what a step keeps."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.device.lane import Ticket
from infinity.errors import CapacityError, StorageError
from infinity.memory.heap import Heap
from infinity.obs.ledger import Ledger
from infinity.storage.io_engine import IoEngine
from infinity.storage.store import LinkTicket
from infinity.storage.swap_file import SwapFile


@dataclass(frozen=True)
class FilePiece:
    """Bytes of one of the files."""

    disk: int
    start: int
    nbytes: int


class ActivationFile:
    """One file per disk; pieces are dealt out in turn, and a file is as long as the pieces at its longest moment.

    ``room`` is what the budget leaves for them, in bytes; None where there is no budget but the disk's free space.
    """

    def __init__(self, engine: IoEngine, files: Sequence[SwapFile], room: int | None, ledger: Ledger) -> None:
        self._engine = engine
        self._files = files
        self._heaps = [Heap(1 << 62) for _ in files]
        self._lengths = [0 for _ in files]
        self._room = room
        self._ledger = ledger
        self._turn = 0

    @property
    def peak(self) -> int:
        """Bytes of disk in use at the longest moment."""
        return sum(self._lengths)

    def take(self, nbytes: int) -> FilePiece:
        """A free place on the next disk; the file grows if it has none."""
        disk = self._turn % len(self._files)
        self._turn += 1
        start = self._heaps[disk].take(nbytes)
        assert start is not None
        if (growth := self._heaps[disk].peak - self._lengths[disk]) > 0:
            self._grow(disk, growth)
        return FilePiece(disk, start, nbytes)

    def give(self, piece: FilePiece) -> None:
        """Ends the use of a place."""
        self._heaps[piece.disk].give(piece.start)

    def write(self, piece: FilePiece, source: torch.Tensor) -> Ticket:
        """Writes ``source`` (uint8), which must not change until the ticket is done."""
        self._ledger.begin("nvme_write", source.numel())
        return LinkTicket(self._engine.write(self._files[piece.disk], piece.start, source), self._ledger, "nvme_write")

    def read(self, piece: FilePiece, into: torch.Tensor) -> Ticket:
        """Fills ``into`` (uint8)."""
        self._ledger.begin("nvme_read", into.numel())
        return LinkTicket(self._engine.read(self._files[piece.disk], piece.start, into), self._ledger, "nvme_read")

    def _grow(self, disk: int, growth: int) -> None:
        if self._room is not None and self.peak + growth > self._room:
            missing = self.peak + growth - self._room
            raise CapacityError(
                f"nvme memory: unit inputs need {self.peak + growth} bytes of swap, but infinity.nvme_space leaves "
                f"{self._room} for them beside the rest of the plan. Raise it by at least {missing} bytes, make "
                "micro-batches smaller, or recompute fewer units",
                missing,
            )
        file = self._files[disk]
        try:
            os.posix_fallocate(file.fileno(), self._lengths[disk], growth)
        except OSError as error:
            raise StorageError(
                "cannot reserve swap space for activations",
                path=file.path,
                offset=self._lengths[disk],
                length=growth,
                errno=error.errno,
                action="Free space there, choose another nvme_path, or make micro-batches smaller"
                if error.errno == errno.ENOSPC
                else None,
            ) from None
        self._lengths[disk] += growth
