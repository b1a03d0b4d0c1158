"""A file that is read in any order, every byte checked against its checksum before it is used."""

from __future__ import annotations

import errno
import os
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from types import TracebackType

import torch

from infinity.checkpoint.disk import told
from infinity.checkpoint.header import TensorPlace, read_header
from infinity.checkpoint.output_file import CHUNK_BYTES
from infinity.errors import CheckpointError
from infinity.memory.host import HostMemory

CACHED_CHUNKS = 4


class ChunkCache:
    """The chunks read last, in memory that is used again and again."""

    def __init__(self, count: int = CACHED_CHUNKS) -> None:
        self._free = [HostMemory(CHUNK_BYTES) for _ in range(count)]
        self._used: OrderedDict[tuple[str, int], HostMemory] = OrderedDict()

    def get(self, file: InputFile, chunk: int) -> torch.Tensor:
        """The bytes of one chunk of ``file``, checked."""
        key = file.path, chunk
        memory = self._used.get(key)
        if memory is None:
            memory = self._free.pop() if self._free else self._used.popitem(last=False)[1]
            try:
                file.fill(chunk, memory.bytes)
            except BaseException:
                self._free.append(memory)
                raise
            self._used[key] = memory
        self._used.move_to_end(key)
        return memory.bytes

    def free(self) -> None:
        """Gives the memory back."""
        for memory in [*self._free, *self._used.values()]:
            memory.free()
        self._free, self._used = [], OrderedDict()


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
                for chunk in range(self.header_chunks()):
                    cache.get(self, chunk)
            self.tensors, self.metadata = read_header(self._descriptor, path)
        except BaseException:
            self.close()
            raise

    def header_chunks(self) -> int:
        """How many chunks the header touches, by what its first bytes say."""
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        return -(-min(length + 8, self.nbytes) // CHUNK_BYTES)

    def read(self, place: TensorPlace, start: int, stop: int, into: torch.Tensor) -> None:
        """Copies bytes ``start`` to ``stop`` of a tensor to ``into`` (uint8, so many bytes)."""
        position, end = place.start + start, place.start + stop
        done = 0
        while position < end:
            chunk, inside = divmod(position, CHUNK_BYTES)
            take = min(end - position, CHUNK_BYTES - inside)
            into[done : done + take].copy_(self._cache.get(self, chunk)[inside : inside + take])
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
        for chunk in range(-(-self.nbytes // CHUNK_BYTES)):
            self._cache.get(self, chunk)

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
