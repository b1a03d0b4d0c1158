"""Writes a checkpoint straight from the tiers its states are on."""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import torch

from infinity.checkpoint.disk import Disk, read_file, write_file
from infinity.checkpoint.folder import INCOMPLETE, Folder
from infinity.checkpoint.header import CODES, lay_out
from infinity.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    VERSION,
    Manifest,
    RankPart,
    SavedFile,
    SavedParameter,
    SavedTile,
    SavedUnit,
    part_name,
    shard_name,
    to_json,
)
from infinity.checkpoint.output_file import CHUNK_BYTES, OutputFile, Written
from infinity.checkpoint.writers import Writers
from infinity.comm import Group
from infinity.config.size import format_bytes
from infinity.device.lane import DONE, Ticket
from infinity.errors import StorageError
from infinity.memory.host import HostMemory
from infinity.plan.placement import Placement
from infinity.shard.partition import Partition, Unit
from infinity.shard.tiles import Piece
from infinity.storage.store import Store
from infinity.tier import StateKind

log = logging.getLogger("infinity")

BUFFERS = "buffers.safetensors"
FILE_BYTES = 1 << 30
"""Units that follow each other share a file up to this size."""

WINDOW_BYTES = 8 << 20
"""Bytes on their way from a swap file to the checkpoint, in each of a few windows."""

READ_AHEAD = 1
WRITERS = 2
WINDOWS = READ_AHEAD + WRITERS
"""Those that are read into, those that are written; a checksum is taken while a window is."""

TOLD_SECONDS = 10.0
"""How often a long save is logged."""

Progress = Callable[[int, int], None]
"""Is told how many bytes are written, of how many; the last call comes when the checkpoint is complete."""

SAVED_KINDS = (StateKind.PARAM, StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)


@dataclass(frozen=True)
class Contents:
    """Everything that goes into a checkpoint.

    ``steps`` are optimizer steps by unit index with slot number; ``buffers`` by name. ``state`` is the same on every
    rank, ``rank_state`` this rank's own: both as ``values.encode`` gives them, with their ``tensors`` beside them.
    """

    partition: Partition
    placement: Placement
    stores: dict[StateKind, Store]
    group: Group
    steps: dict[tuple[int, int], int]
    buffers: dict[str, torch.Tensor]
    state: Any
    rank_state: Any
    tensors: Sequence[tuple[str, torch.Tensor]]
    config: dict[str, Any]
    plan: str
    step: int

    @property
    def units(self) -> Sequence[Unit]:
        return self.partition.units

    def kinds(self, unit: Unit) -> list[StateKind]:
        """What is saved of a unit; a 16-bit copy beside a master is the master rounded, so it is not."""
        derived = self.placement.has(StateKind.MASTER, unit)
        return [
            kind for kind in SAVED_KINDS if self.placement.has(kind, unit) and not (kind is StateKind.PARAM and derived)
        ]

    @property
    def nbytes(self) -> int:
        """Of this rank's tensors."""
        states = sum(self.placement.nbytes(kind, unit) for unit in self.units for kind in self.kinds(unit))
        others = [tensor for _, tensor in self.tensors]
        if self.group.rank == 0:
            others += self.buffers.values()
        return states + sum(tensor.nbytes for tensor in others)


def save(
    folder: Folder,
    tag: str,
    contents: Contents,
    keep_last: int | None = None,
    progress: Progress | None = None,
    kept: Callable[[int], None] | None = None,
) -> str:
    """Writes the checkpoint ``tag``; returns its directory when it is complete on disk.

    What is in ``contents`` may not change meanwhile, but for the states of a unit after ``kept`` was called with its
    index. Extra memory: a few windows. Raises ``StorageError`` for a file that could not be written, in which case
    earlier checkpoints are as they were, or what ``progress`` raises.
    """
    start, group = time.perf_counter(), contents.group
    first = group.rank == 0
    with ExitStack() as stack:
        directory = together(group, "the beginning of a checkpoint", lambda: _begin(folder, tag, stack, first=first))
        try:
            writer = _Writer(folder.disk, directory, contents, progress, kept)
            own = together(group, "the files of a checkpoint", writer.write_rank)
            shares = group.talk("the bytes of a checkpoint", own.to_bytes(8, "little"))
            end = lambda: _complete(folder, tag, writer, keep_last) if first else None  # noqa: E731
            together(group, "the end of a checkpoint", end)
        except BaseException:
            if first:
                with suppress(OSError):
                    folder.disk.remove(directory)
            raise
    path, seconds = folder.of(tag), time.perf_counter() - start
    nbytes = sum(int.from_bytes(share, "little") for share in shares)
    if progress is not None:
        progress(contents.nbytes, contents.nbytes)
    log.info("checkpoint %s: %s in %.2f s (%.2f GB/s)", path, format_bytes(nbytes), seconds, nbytes / seconds / 1e9)
    return path


def _begin(folder: Folder, tag: str, stack: ExitStack, *, first: bool) -> str:
    """The directory to write to; the first rank makes it."""
    if not first:
        return folder.of(tag) + INCOMPLETE
    stack.enter_context(folder.writing())
    return folder.prepare(tag)


def _complete(folder: Folder, tag: str, writer: _Writer, keep_last: int | None) -> None:
    writer.write_manifest()
    folder.publish(tag)
    if keep_last is not None:
        folder.prune(keep_last)


Result = TypeVar("Result")


def together(group: Group, name: str, work: Callable[[], Result]) -> Result:
    """Does this rank's part, then raises on every rank if it failed on one."""
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    told = group.talk(name, b"" if error is None else f"{error}".encode() or b"?")
    if error is not None:
        raise error
    for rank, words in enumerate(told):
        if words:
            raise StorageError(f"rank {rank} could not do its part: {words.decode(errors='replace')}")
    return result


@dataclass
class _Window:
    memory: HostMemory
    busy: Ticket = DONE


@dataclass(frozen=True)
class _Piece:
    """Bytes of a unit on their way to a file, in a window if their home is another file."""

    unit: int
    is_last: bool
    data: torch.Tensor
    window: _Window | None


class _Writer:
    """One rank's part in one checkpoint."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        contents: Contents,
        progress: Progress | None,
        kept: Callable[[int], None] | None,
    ) -> None:
        self._disk, self._directory, self._contents = disk, directory, contents
        self._rank = contents.group.rank
        self._files: dict[str, OutputFile] = {}
        self._ends: list[Ticket] = []
        self._windows: list[_Window] = []
        self._shards: dict[str, list[Unit]] = {}
        self._progress, self._kept = progress, kept
        self._done, self._nbytes = 0, contents.nbytes
        self._counting = Lock()
        self._told = time.perf_counter()

    def write_rank(self) -> int:
        """Writes the files of this rank; returns their bytes."""
        contents = self._contents
        if not os.path.isdir(self._directory):
            raise StorageError(
                "rank 0 did not make",
                path=self._directory,
                action="Give all ranks one directory that all see, one tag",
            )
        shards = self._shards = _grouped(contents)
        self._check_space()
        self._writers = Writers(WRITERS)
        try:
            # First what may belong to any unit, as a torch optimizer's states do: nothing is kept before.
            self._write_tensors(shard_name("state", self._rank), contents.tensors)
            if self._rank == 0:
                self._write_tensors(BUFFERS, list(contents.buffers.items()))
            for stem, units in shards.items():
                self._write_units(shard_name(stem, self._rank), units)
            for window in self._windows:
                window.busy.wait()
            for end in self._ends:
                end.wait()
        finally:
            self._writers.close()
            for file in self._files.values():
                file.abandon()
            for window in self._windows:
                window.memory.free()
        files = {name: _record(file.written) for name, file in self._files.items()}
        part = RankPart(files=files, state=contents.rank_state)
        write_file(self._disk, self._path(part_name(self._rank)), to_json(part))
        return sum(file.nbytes for file in files.values())

    def write_manifest(self) -> None:
        """Says what all ranks wrote."""
        write_file(self._disk, self._path(MANIFEST), to_json(self._manifest()))

    def _manifest(self) -> Manifest:
        contents, world_size = self._contents, self._contents.group.world_size
        stem_of = {unit.index: stem for stem, units in self._shards.items() for unit in units}
        units = [
            SavedUnit(
                name=unit.name,
                dtype=CODES[unit.layout.dtype],
                trainable=unit.trainable,
                shard_numel=unit.layout.shard_numel,
                kinds=contents.kinds(unit),
                file=stem_of[unit.index],
            )
            for unit in contents.units
        ]
        names = contents.partition.names
        parameters = {
            name: SavedParameter(
                unit=pieces[0].unit,
                start=_start(contents, pieces[0]),
                shape=list(pieces[0].shape),
                steps=contents.steps.get((pieces[0].unit, pieces[0].slot), 0),
                also=names[name][1:],
                tiles=[
                    SavedTile(
                        unit=piece.unit, start=_start(contents, piece), low=list(piece.start), high=list(piece.stop)
                    )
                    for piece in pieces
                    if not piece.is_whole
                ],
            )
            for name, pieces in contents.partition.pieces.items()
        }
        return Manifest(
            format=FORMAT,
            version=VERSION,
            world_size=world_size,
            chunk_bytes=CHUNK_BYTES,
            parts={part_name(rank): self._part(part_name(rank)) for rank in range(world_size)},
            units=units,
            parameters=parameters,
            buffers={name: list(value.shape) for name, value in contents.buffers.items()},
            step=contents.step,
            state=contents.state,
            config=contents.config,
            plan=contents.plan,
        )

    def _part(self, name: str) -> SavedFile:
        raw = read_file(self._path(name), MAX_MANIFEST_BYTES)
        return checksummed(raw)

    def _write_units(self, name: str, units: Iterable[Unit]) -> None:
        contents = self._contents
        members = [(unit, kind) for unit in units for kind in contents.kinds(unit)]
        tensors = [
            (f"{unit.index}.{kind.value}", contents.placement.dtype(kind, unit), (unit.layout.shard_numel,))
            for unit, kind in members
        ]
        file = self._open(name, tensors)
        ahead: deque[_Piece] = deque()
        for unit, kind in members:
            store, nbytes = contents.stores[kind], contents.placement.nbytes(kind, unit)
            home, last_kind = store.resident(unit.index), contents.kinds(unit)[-1]
            for start in range(0, nbytes, WINDOW_BYTES):
                stop = min(start + WINDOW_BYTES, nbytes)
                is_last = kind is last_kind and stop == nbytes
                if home is not None:
                    ahead.append(_Piece(unit.index, is_last, home[start:stop], None))
                    self._drain(file, ahead, 0)
                    continue
                window = self._window()
                data = window.memory.bytes[: stop - start]
                window.busy = store.read(unit.index, start, data)
                ahead.append(_Piece(unit.index, is_last, data, window))
                self._drain(file, ahead, READ_AHEAD)
        self._drain(file, ahead, 0)
        self._ends.append(file.finish())

    def _drain(self, file: OutputFile, ahead: deque[_Piece], left: int) -> None:
        """Passes on what was read first, until ``left`` reads are under way."""
        while len(ahead) > left:
            piece = ahead.popleft()
            if piece.window is not None:
                piece.window.busy.wait()
            written = file.append(piece.data)
            if piece.window is not None:
                piece.window.busy = written
            if piece.is_last and self._kept is not None:
                self._writers.after(partial(self._kept, piece.unit))

    def _write_tensors(self, name: str, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        file = self._open(name, [(key, value.dtype, tuple(value.shape)) for key, value in tensors])
        for _, value in tensors:
            file.append(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
        self._ends.append(file.finish())

    def _open(self, name: str, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> OutputFile:
        metadata = {"format": "pt", "rank": str(self._rank), "world_size": str(self._contents.group.world_size)}
        header, _, nbytes = lay_out(tensors, metadata)
        file = self._files[name] = OutputFile(self._disk, self._path(name), nbytes, self._writers, wrote=self._wrote)
        file.append_header(header)
        return file

    def _window(self) -> _Window:
        """The window that was used longest ago, when its bytes are written."""
        if len(self._windows) < WINDOWS:
            self._windows.append(_Window(HostMemory(WINDOW_BYTES)))
            return self._windows[-1]
        window = self._windows.pop(0)
        self._windows.append(window)
        window.busy.wait()
        return window

    def _wrote(self, nbytes: int) -> None:
        with self._counting:
            self._done += nbytes
            done = min(self._done, self._nbytes - 1)  # it is not all before the checkpoint is complete
            if self._progress is not None:
                self._progress(done, self._nbytes)
            now = time.perf_counter()
            if now - self._told > TOLD_SECONDS:
                self._told = now
                share = " of this rank" if self._contents.group.world_size > 1 else ""
                told = f"{format_bytes(done)} of {format_bytes(self._nbytes)}{share}"
                log.info("checkpoint %s: %s written", self._directory, told)

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _check_space(self) -> None:
        needed = self._nbytes * self._contents.group.world_size
        status = os.statvfs(self._directory)
        free = status.f_bavail * status.f_frsize
        if free < needed:
            raise StorageError(
                f"a checkpoint needs {needed} bytes but only {free} are free in",
                path=os.path.dirname(self._directory),
                action="Free the difference, save elsewhere, or keep fewer checkpoints",
            )


def _start(contents: Contents, piece: Piece) -> int:
    return contents.units[piece.unit].layout.slots[piece.slot].offset


def _grouped(contents: Contents) -> dict[str, list[Unit]]:
    """Units by the file they share."""
    found: dict[str, list[Unit]] = {}
    used = FILE_BYTES
    for unit in contents.units:
        nbytes = sum(contents.placement.nbytes(kind, unit) for kind in contents.kinds(unit))
        if used + nbytes > FILE_BYTES:
            found[f"units-{len(found):05}"] = []
            used = 0
        next(reversed(found.values())).append(unit)
        used += nbytes
    return found


def checksummed(raw: bytes) -> SavedFile:
    """The record of a file that is held in memory."""
    chunks = range(0, len(raw), CHUNK_BYTES)
    return SavedFile(nbytes=len(raw), crc32=[zlib.crc32(raw[start : start + CHUNK_BYTES]) for start in chunks])


def _record(written: Written) -> SavedFile:
    return SavedFile(nbytes=written.nbytes, crc32=list(written.crc32))
