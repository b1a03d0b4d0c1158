"""What a checkpoint says about itself: its parameters by name, where their bytes are."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infinity.checkpoint.header import DTYPES
from infinity.checkpoint.output_file import CHUNK_BYTES
from infinity.errors import CheckpointError
from infinity.shard.tiles import Piece, whole_piece
from infinity.tier import StateKind

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 30
FORMAT: Literal["infinity-checkpoint"] = "infinity-checkpoint"
VERSION: Literal[1] = 1
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")

Size = Annotated[int, Field(ge=0, lt=1 << 60)]
Checksum = Annotated[int, Field(ge=0, lt=1 << 32)]


class Part(BaseModel):
    """An object of the manifest: unknown keys refused, nothing converted, nothing changed later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SavedFile(Part):
    """A file's size in bytes, the CRC-32 of each of its chunks."""

    nbytes: Size
    crc32: list[Checksum]


class SavedUnit(Part):
    """A flat buffer that was cut into one shard per rank, each in a file ``<file>.rank-<r>.safetensors``.

    In that file tensor ``<index of this unit>.<kind>`` is the shard, 1-D of ``shard_numel`` elements.
    """

    name: str
    dtype: str
    trainable: bool
    shard_numel: Size
    kinds: list[StateKind]
    file: str


class SavedTile(Part):
    """A part ``parameter[low[0]:high[0], low[1]:high[1]]``, row by row, of which ``start`` is the first element."""

    unit: Size
    start: Size
    low: Annotated[list[Size], Field(min_length=2, max_length=2)]
    high: Annotated[list[Size], Field(min_length=2, max_length=2)]


class SavedParameter(Part):
    """Elements ``start`` to ``start + numel`` of its unit's flat buffer, whose shards are in rank order.

    Of a matrix that was trained in tiles these are the elements of the first one; ``tiles`` are all of them.
    """

    unit: Size
    start: Size
    shape: list[Size]
    steps: Size
    also: list[str]
    tiles: list[SavedTile] = []

    @property
    def pieces(self) -> list[tuple[Piece, int]]:
        """Its tiles, or itself, each with its start in its unit."""
        shape = tuple(self.shape)
        if not self.tiles:
            return [(whole_piece(shape, unit=self.unit), self.start)]
        return [(Piece("", shape, tile.unit, 0, tuple(tile.low), tuple(tile.high)), tile.start) for tile in self.tiles]

    @property
    def is_complete(self) -> bool:
        """Whether the tiles are a grid that covers the matrix, in row-major order."""
        if not self.tiles:
            return True
        rows = list(dict.fromkeys((tile.low[0], tile.high[0]) for tile in self.tiles))
        columns = list(dict.fromkeys((tile.low[1], tile.high[1]) for tile in self.tiles))
        if len(rows) * len(columns) != len(self.tiles):
            return False
        grid = [((top, left), (bottom, right)) for top, bottom in rows for left, right in columns]
        return (
            len(self.shape) == 2
            and [(tuple(tile.low), tuple(tile.high)) for tile in self.tiles] == grid
            and all(_is_chain(cuts, size) for cuts, size in zip((rows, columns), self.shape, strict=True))
        )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def _is_chain(cuts: list[tuple[int, int]], size: int) -> bool:
    """Whether each of the ``(low, high)`` begins where the one before ends, from 0 to ``size``."""
    lows, highs = [low for low, _ in cuts], [high for _, high in cuts]
    return [*lows, size] == [0, *highs] and all(low < high for low, high in cuts)


class RankPart(Part):
    """What one rank wrote, with the state that only it has."""

    files: dict[str, SavedFile]
    state: Any


class Manifest(Part):
    """The whole of it; ``parts`` are the checksums of the ranks' own JSON files."""

    format: Literal["infinity-checkpoint"]
    version: Literal[1]
    self_crc32: Checksum = 0
    world_size: Annotated[int, Field(ge=1, le=1 << 20)]
    chunk_bytes: Annotated[int, Field(ge=1, lt=1 << 40)]
    parts: dict[str, SavedFile]
    units: list[SavedUnit]
    parameters: dict[str, SavedParameter]
    buffers: dict[str, list[Size]]
    step: Size
    state: Any
    config: dict[str, Any]
    plan: str

    def problems(self) -> list[str]:
        """What does not fit together."""
        found = []
        if self.chunk_bytes != CHUNK_BYTES:
            found.append(f"chunk_bytes is {self.chunk_bytes}, expected {CHUNK_BYTES}")
        if sorted(self.parts) != sorted(part_name(rank) for rank in range(len(self.parts))):
            found.append("parts are not those of ranks 0, 1, ...")
        if len(self.parts) != self.world_size:
            found.append(f"it has {len(self.parts)} parts of {self.world_size} ranks")
        for index, unit in enumerate(self.units):
            if not PLAIN_NAME.fullmatch(unit.file):
                found.append(f"units[{index}].file is {unit.file!r:.80}, which is no plain file name")
            if unit.dtype not in DTYPES:
                found.append(f"units[{index}].dtype is {unit.dtype!r:.40}, which is not known")
        for name, parameter in self.parameters.items():
            if not parameter.is_complete:
                found.append(f"the tiles of {name} are not all of it, each element once")
                continue
            for piece, start in parameter.pieces:
                if piece.unit >= len(self.units):
                    found.append(f"{name} is in unit {piece.unit} of {len(self.units)}")
                elif start + math.prod(piece.tile_shape) > self.units[piece.unit].shard_numel * self.world_size:
                    found.append(f"{name} ends behind the end of its unit")
        return found

    def dtype(self, unit: int, kind: StateKind) -> torch.dtype:
        """The dtype in which a kind of a unit was saved."""
        return DTYPES[self.units[unit].dtype] if kind is StateKind.PARAM else torch.float32


def part_name(rank: int) -> str:
    return f"rank-{rank}.json"


def shard_name(file: str, rank: int) -> str:
    return f"{file}.rank-{rank}.safetensors"


def to_json(document: Part) -> bytes:
    """The document as a file. A manifest carries the CRC-32 of its own JSON, keys sorted, without that number."""
    values = document.model_dump(mode="json")
    if isinstance(document, Manifest):
        values["self_crc32"] = _self_checksum(values)
    return json.dumps(values, indent=1, allow_nan=False).encode() + b"\n"


def _self_checksum(values: Mapping[str, Any]) -> int:
    rest = {name: value for name, value in values.items() if name != "self_crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


Document = TypeVar("Document", bound=Part)


def parse(kind: type[Document], raw: bytes, path: str) -> Document:
    """A document from its JSON; CheckpointError with what is wrong with it."""

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    try:
        document = json.loads(raw, parse_constant=refuse)
        if not isinstance(document, Mapping):
            raise CheckpointError(f"{path} is no JSON object; it is damaged or no checkpoint")
        if kind is Manifest and document.get("format") == FORMAT and document.get("version") != VERSION:
            raise CheckpointError(
                f"{path} has version {document.get('version')!r:.20} of the format; this program reads {VERSION}"
            )
        parsed = kind.model_validate_json(raw)
        whole = kind is not Manifest or document.get("self_crc32") == _self_checksum(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path} is damaged or no checkpoint: {where:.200}: {first['msg']:.200}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint: {error!s:.200}") from None
    if not whole:
        raise CheckpointError(f"{path} is damaged: it does not have the checksum it was saved with")
    if isinstance(parsed, Manifest) and (problems := parsed.problems()):
        raise CheckpointError(f"{path} is damaged: {'; '.join(problems[:5])}")
    return parsed
