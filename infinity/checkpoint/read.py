"""A complete checkpoint, opened: values by parameter name with an element range."""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from typing import Any

import torch

from infinity.checkpoint import values
from infinity.checkpoint.disk import read_file
from infinity.checkpoint.input_file import ChunkCache, InputFile
from infinity.checkpoint.load import Reader
from infinity.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    PLAIN_NAME,
    Manifest,
    RankPart,
    SavedFile,
    SavedParameter,
    parse,
    part_name,
    shard_name,
)
from infinity.checkpoint.pieces import Sources, piece_reader
from infinity.checkpoint.save import BUFFERS, checksummed
from infinity.errors import CheckpointError
from infinity.memory.host import HostMemory
from infinity.shard.tiles import whole_piece
from infinity.tier import StateKind

MAX_OPEN_FILES = 32


class Checkpoint:
    """Reads any part of a checkpoint, whatever ranks and units it was saved with, in constant memory.

    Every byte is checked before it is given away. A context manager: it holds open files and a few megabytes.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        manifest_path = os.path.join(path, MANIFEST)
        written = read_file(manifest_path, MAX_MANIFEST_BYTES)
        self.checksum = zlib.crc32(written)
        self.manifest = parse(Manifest, written, manifest_path)
        self._cache = ChunkCache()
        self._files: OrderedDict[str, InputFile] = OrderedDict()
        self._scratch = HostMemory(0)
        self.parts: list[RankPart] = []
        self.files: dict[str, SavedFile] = {}
        for rank in range(self.manifest.world_size):
            part_path = os.path.join(path, part_name(rank))
            raw = read_file(part_path, MAX_MANIFEST_BYTES)
            if checksummed(raw) != self.manifest.parts[part_name(rank)]:
                raise CheckpointError(f"{part_path} is damaged: it does not have the checksum it was saved with")
            self.parts.append(parse(RankPart, raw, part_path))
            self.files |= self.parts[-1].files
        if unsafe := [name for name in self.files if not PLAIN_NAME.fullmatch(name)]:
            raise CheckpointError(f"{path} is damaged: {unsafe[0]!r:.80} is no plain file name")

    def kinds(self, parameter: SavedParameter) -> list[StateKind]:
        return self.manifest.units[parameter.unit].kinds

    def value_kind(self, parameter: SavedParameter) -> StateKind:
        """The kind that holds the parameter's most precise value."""
        kinds = self.kinds(parameter)
        return StateKind.MASTER if StateKind.MASTER in kinds else StateKind.PARAM

    def read(self, parameter: SavedParameter, kind: StateKind, start: int, into: torch.Tensor) -> None:
        """Copies elements from ``start`` of the flattened parameter on into ``into`` (1-D), converting the dtype."""
        self.reader(parameter, kind)(start, into)

    def reader(self, parameter: SavedParameter, kind: StateKind) -> Reader:
        """``read`` of one parameter."""
        return piece_reader(whole_piece(tuple(parameter.shape)), self.sources(parameter, kind))

    def sources(self, parameter: SavedParameter, kind: StateKind) -> Sources:
        """Readers of the pieces that a parameter was saved in."""

        def slot(unit: int, first: int) -> Reader:
            return lambda start, into: self._read_unit(unit, kind, first + start, into)

        return [(piece, slot(piece.unit, start)) for piece, start in parameter.pieces]

    def _read_unit(self, index: int, kind: StateKind, position: int, into: torch.Tensor) -> None:
        """Copies elements from a position in the flat buffer of the unit ``index`` on."""
        dtype = self.manifest.dtype(index, kind)
        nbytes = into.numel() * dtype.itemsize
        alike = into.dtype == dtype and into.is_contiguous()
        if not alike and self._scratch.nbytes < nbytes:
            self._scratch.free()
            self._scratch = HostMemory(nbytes)
        raw = into.view(torch.uint8) if alike else self._scratch.bytes[:nbytes]
        unit = self.manifest.units[index]
        end, done = position + into.numel(), 0
        while position < end:
            rank, inside = divmod(position, unit.shard_numel)
            take = min(end - position, unit.shard_numel - inside)
            file = self.file(shard_name(unit.file, rank))
            name = f"{index}.{kind.value}"
            place = file.tensors.get(name)
            if place is None or place.dtype != dtype or place.numel != unit.shard_numel:
                raise CheckpointError(f"{file.path} holds no {dtype} tensor {name} of {unit.shard_numel} elements")
            first, size = inside * dtype.itemsize, take * dtype.itemsize
            file.read(place, first, first + size, raw[done : done + size])
            position += take
            done += size
        if not alike:
            into.copy_(raw.view(dtype))

    def buffer(self, name: str) -> torch.Tensor:
        """A saved buffer."""
        return self.file(BUFFERS).tensor(name)

    def state(self) -> Any:
        """What was the same on every rank."""
        return values.decode(self.manifest.state, self.file(shard_name("state", 0)).tensor)

    def rank_state(self, rank: int) -> Any:
        """What only ``rank`` had; None if there was no such rank."""
        if rank >= self.manifest.world_size:
            return None
        return values.decode(self.parts[rank].state, self.file(shard_name("state", rank)).tensor)

    def verify(self) -> int:
        """Reads every file against its checksums; returns the bytes."""
        for name in self.files:
            self.file(name).verify()
        return sum(file.nbytes for file in self.files.values())

    def file(self, name: str) -> InputFile:
        """One of its files, open."""
        if name not in self._files:
            if name not in self.files:
                raise CheckpointError(f"{self.path} is damaged: no rank wrote {name}")
            if len(self._files) >= MAX_OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            known = self.files[name]
            self._files[name] = InputFile(os.path.join(self.path, name), self._cache, known.crc32, known.nbytes)
        self._files.move_to_end(name)
        return self._files[name]

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._cache.free()
        self._scratch.free()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
