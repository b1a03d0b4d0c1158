"""The head of a safetensors file: which tensor lies where."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity.errors import CheckpointError
from infinity.tier import PAGE_BYTES, round_up

MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library itself accepts."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorPlace:
    """One tensor of a file: ``start`` is the first byte in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def lay_out(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> tuple[bytes, list[TensorPlace], int]:
    """Header bytes, places, size of the file. Data begins on a page, so that whole pages can be moved directly."""
    document: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    used = 0
    for name, dtype, shape in tensors:
        if dtype not in CODES:
            raise CheckpointError(f"{name} is {dtype}, which the safetensors format has no name for; convert it")
        nbytes = TensorPlace(name, dtype, shape, 0).nbytes
        document[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [used, used + nbytes]}
        used += nbytes
    text = json.dumps(document, separators=(",", ":")).encode()
    size = round_up(8 + len(text), PAGE_BYTES)
    if size - 8 > MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(tensors)} tensors are too many for one safetensors file; save into more files")
    places = [
        TensorPlace(name, dtype, shape, size + document[name]["data_offsets"][0]) for name, dtype, shape in tensors
    ]
    return struct.pack("<Q", size - 8) + text.ljust(size - 8), places, size + used


def read_header(descriptor: int, path: str) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """Every tensor of an open file with its metadata; CheckpointError if the file is not a whole safetensors file."""
    size = os.fstat(descriptor).st_size
    first = os.pread(descriptor, 8, 0)
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(f"{path} is not a safetensors file: its header claims {length} of {size} bytes")
    raw = b""
    while len(raw) < length:
        piece = os.pread(descriptor, length - len(raw), 8 + len(raw))
        if not piece:
            raise CheckpointError(f"{path} ends inside its header; it was cut short")
        raw += piece
    return parse_header(raw, size, path)


def parse_header(raw: bytes, size: int, path: str) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """The same of the header's own bytes, given the size of the file."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its safetensors header is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: its safetensors header is no JSON object")
    metadata = document.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ of its safetensors header is no object of texts")
    start = 8 + len(raw)
    found = {name: _place(name, entry, start, path) for name, entry in document.items()}
    end = start
    for place in sorted(found.values(), key=lambda place: (place.start, place.nbytes)):
        if place.start != end:
            raise CheckpointError(f"{path}: tensor {place.name!r:.80} does not begin where the one before it ends")
        end += place.nbytes
    if end != size:
        raise CheckpointError(f"{path} is {size} bytes long, but its tensors end at byte {end}; it was cut or extended")
    return found, metadata


def _place(name: str, entry: Any, start: int, path: str) -> TensorPlace:
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name!r:.80}: {what}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise wrong("expected dtype, shape, data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise wrong(f"dtype {code!r:.40} is not known")
    if not isinstance(shape, list) or not all(_is_size(length) for length in shape):
        raise wrong(f"shape {shape!r:.80} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise wrong(f"data_offsets {offsets!r:.80} are not two byte offsets")
    place = TensorPlace(name, DTYPES[code], tuple(shape), start + offsets[0])
    if offsets[1] - offsets[0] != place.nbytes:
        raise wrong(f"{offsets[1] - offsets[0]} bytes of data, but its shape and dtype need {place.nbytes}")
    return place


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 60
