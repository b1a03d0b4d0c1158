"""A file that is read in any order, every byte checked against its checksum before it is used."""

from __future__ import annotations

import errno
import os
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from infinity.checkpoint.disk import told
from infinity.checkpoint.header import TensorPlace, read_header
from infinity.checkpoint.output_file import CHUNK_BYTES
from infinity.device.lane import DONE, CallersLane, Lane, Ticket
from infinity.errors import CheckpointError
from infinity.memory.host import HostMemory

CACHED_CHUNKS = 4
READ_AHEAD = 2
"""Chunks that are read, then checked, each by a thread of its own, while the one before them is used."""


@dataclass
class Chunk:
    """Memory for the bytes of one chunk; they are there, checked, when ``arrived`` is done."""

    memory: HostMemory
    arrived: Ticket = DONE


class ChunkCache:
    """The chunks read last with those that come next, in memory that is used again and again."""

    def __init__(self, count: int = CACHED_CHUNKS) -> None:
        self._free = [Chunk(HostMemory(CHUNK_BYTES)) for _ in range(count)]
        self._used: OrderedDict[tuple[str, int], Chunk] = OrderedDict()
        self._ahead = min(READ_AHEAD, count - 1)
        self._lanes: list[Lane | CallersLane] = [Lane(f"checkpoint-read-{number}") for number in range(self._ahead)]
        self._lanes = self._lanes or [CallersLane()]

    def get(self, file: InputFile, chunk: int, last: int) -> npt.NDArray[np.uint8]:
        """The bytes of one chunk of ``file``, checked; those up to ``last`` will be asked for next."""
        key = file.path, chunk
        found = self._used.get(key) or self._fetch(file, chunk)
        self._used.move_to_end(key)
        for following in range(chunk + 1, min(chunk + self._ahead, last) + 1):
            if (file.path, following) not in self._used:
                self._fetch(file, following)
        try:
            found.arrived.wait()
        except BaseException:
            self._free.append(self._used.pop(key))
            raise
        return found.memory.bytes.numpy()

    def forget(self, file: InputFile) -> None:
        """Ends the reading of ``file``, which is to be closed."""
        for key in [key for key in self._used if key[0] == file.path]:
            self._retire(self._used.pop(key))

    def free(self) -> None:
        """Gives the memory back."""
        for lane in self._lanes:
            lane.close()
        for chunk in [*self._free, *self._used.values()]:
            chunk.memory.free()
        self._free, self._used = [], OrderedDict()

    def _fetch(self, file: InputFile, chunk: int) -> Chunk:
        if not self._free:
            self._retire(self._used.popitem(last=False)[1])
        found = self._free.pop()
        memory = found.memory.bytes
        found.arrived = self._lanes[chunk % len(self._lanes)].submit(lambda: file.fill(chunk, memory))
        self._used[file.path, chunk] = found
        return found

    def _retire(self, chunk: Chunk) -> None:
        with suppress(Exception):  # nobody wanted these bytes
            chunk.arrived.wait()
        self._free.append(chunk)


class InputFile:
    """An open safetensors file; ``crc32`` has one number per chunk, None for a file that came without."""

    def __init__(self, path: str, cache: ChunkCache, crc32: Sequence[int] | None = None, nbytes: int = -1) -> None:
        self.path = path
        self._cache, self._crc32 = cache, crc32
        self._descriptor = self._direct = -1
        with told("cannot open", path):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            self.nbytes = os.fstat(self._descriptor).st_size
            if crc32 is not None and self.nbytes != nbytes:
                raise CheckpointError(f"{path} is {self.nbytes} bytes long, but the checkpoint says {nbytes}")
            if crc32 is not None and len(crc32) != -(-nbytes // CHUNK_BYTES):
                raise CheckpointError(
                    f"{path} has {len(crc32)} checksums for {nbytes} bytes; the checkpoint is damaged"
                )
            try:
                self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
            if crc32 is not None:
                for chunk in range(last := self.header_chunks()):
                    cache.get(self, chunk, last - 1)
            self.tensors, self.metadata = read_header(self._descriptor, path)
        except BaseException:
            self.close()
            raise

    @property
    def chunks(self) -> int:
        return -(-self.nbytes // CHUNK_BYTES)

    def header_chunks(self) -> int:
        """How many chunks the header touches, by what its first bytes say."""
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        return -(-min(length + 8, self.nbytes) // CHUNK_BYTES)

    def read(self, place: TensorPlace, start: int, stop: int, into: torch.Tensor) -> None:
        """Copies bytes ``start`` to ``stop`` of a tensor to ``into`` (uint8, so many bytes)."""
        position, end = place.start + start, place.start + stop
        last = (place.start + place.nbytes - 1) // CHUNK_BYTES
        target, done = into.numpy(), 0  # numpy copies on this thread: a team of threads is dear for a few megabytes
        while position < end:
            chunk, inside = divmod(position, CHUNK_BYTES)
            take = min(end - position, CHUNK_BYTES - inside)
            target[done : done + take] = self._cache.get(self, chunk, last)[inside : inside + take]
            position += take
            done += take

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, in memory of its own."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r:.80}")
        place = self.tensors[name]
        value = torch.empty(place.nbytes, dtype=torch.uint8)
        self.read(place, 0, place.nbytes, value)
        return value.view(place.dtype).view(place.shape)

    def verify(self) -> None:
        """Reads every chunk."""
        for chunk in range(self.chunks):
            self._cache.get(self, chunk, self.chunks - 1)

    def fill(self, chunk: int, memory: torch.Tensor) -> None:
        """Reads one chunk, then compares its checksum."""
        offset = chunk * CHUNK_BYTES
        nbytes = min(CHUNK_BYTES, self.nbytes - offset)
        view = memoryview(memory.numpy())  # type: ignore[arg-type]
        done = 0
        with told("cannot read", self.path):
            while done < nbytes:
                direct = self._direct >= 0 and done == 0
                # Direct I/O asks for whole pages; at the end of the file it gives what there is.
                count = os.preadv(self._direct if direct else self._descriptor, [view[done:]], offset + done)
                if count == 0:
                    raise CheckpointError(f"{self.path} ends at byte {offset + done}, {self.nbytes} were there before")
                done += count
        if self._crc32 is not None and zlib.crc32(view[:nbytes]) != self._crc32[chunk]:
            raise CheckpointError(
                f"{self.path} is damaged: bytes {offset} to {offset + nbytes} do not have the checksum they were saved "
                "with. Use an earlier checkpoint; `infinity ckpt verify` finds those that are whole"
            )

    def close(self) -> None:
        self._cache.forget(self)
        for descriptor in (self._descriptor, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._direct = -1

    def __enter__(self) -> InputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
