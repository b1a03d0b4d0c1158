"""A file that is written front to back by other threads, checksummed on the way."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from infinity.checkpoint.disk import Disk, told, write_all
from infinity.checkpoint.writers import Writers
from infinity.device.lane import DONE, Ticket
from infinity.memory.host import HostMemory
from infinity.tier import PAGE_BYTES

CHUNK_BYTES = 4 << 20
"""Bytes of a file that have a checksum of their own; a reader needs memory for a few of them."""


@dataclass(frozen=True)
class Written:
    """A finished file: its size, the CRC-32 (as in zlib) of each of its chunks."""

    nbytes: int
    crc32: tuple[int, ...]


class OutputFile:
    """Appends bytes in the order given, never through the page cache where the file system allows it.

    ``append`` returns while the bytes are on their way: they must stay as they are until its ticket is done. The first
    error ends all writing; whoever waits for ``finish`` meets it. ``wrote`` is told of the bytes of each write, on the
    thread that wrote; what it raises is such an error.
    """

    def __init__(
        self,
        disk: Disk,
        path: str,
        nbytes: int,
        writers: Writers,
        *,
        direct: bool = True,
        wrote: Callable[[int], None] | None = None,
    ) -> None:
        self.path = path
        self._wrote = wrote
        self._disk, self._writers, self._nbytes = disk, writers, nbytes
        with told("cannot create", path):
            self._descriptor, self._direct = disk.create(path, direct=direct and nbytes % PAGE_BYTES == 0)
        self._used = 0
        self._chunks = [0] * -(-nbytes // CHUNK_BYTES)
        self._error: BaseException | None = None
        self._header: HostMemory | None = None

    def append(self, data: torch.Tensor) -> Ticket:
        """Bytes (uint8, 1-D) that follow those before; for direct I/O whole pages at page-aligned addresses."""
        if self._error is not None:
            raise self._error
        if not data.numel():
            return DONE
        view, offset = memoryview(data.numpy()), self._used  # type: ignore[arg-type]
        self._used += data.numel()
        ticket = self._writers.submit(lambda: self._write(view, offset))
        for start in range(0, len(view), CHUNK_BYTES):
            self._checksum(view[start : start + CHUNK_BYTES], offset + start)
        return ticket

    def append_header(self, header: bytes) -> None:
        """Bytes that this file keeps until they are written."""
        self._header = HostMemory(len(header))
        self._header.bytes.copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        self.append(self._header.bytes)

    def finish(self) -> Ticket:
        """Makes the file durable behind the writes under way."""
        if self._used != self._nbytes:
            raise AssertionError(f"{self.path} was to be {self._nbytes} bytes, {self._used} were given")
        return self._writers.after(self._sync)

    @property
    def written(self) -> Written:
        return Written(self._nbytes, tuple(self._chunks))

    def abandon(self) -> None:
        """Closes the file after an error; nothing may be under way."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._disk.close(self._descriptor)
            self._descriptor = -1

    def _checksum(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            chunk = (offset + done) // CHUNK_BYTES
            take = min(len(view) - done, (chunk + 1) * CHUNK_BYTES - offset - done)
            self._chunks[chunk] = zlib.crc32(view[done : done + take], self._chunks[chunk])
            done += take

    def _write(self, view: memoryview, offset: int) -> None:
        if self._error is not None:
            return
        try:
            with told("cannot write", self.path):
                write_all(self._disk, self._descriptor, view, offset)
            if self._wrote is not None:
                self._wrote(len(view))
        except BaseException as error:
            self._error = error
            raise

    def _sync(self) -> None:
        if self._error is not None:
            raise self._error  # of a write whose own ticket nobody may have waited for
        descriptor, self._descriptor = self._descriptor, -1
        try:
            with told("cannot make durable", self.path):
                self._disk.sync(descriptor)
        finally:
            with told("cannot close", self.path):
                self._disk.close(descriptor)
