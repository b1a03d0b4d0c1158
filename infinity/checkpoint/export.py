"""Writes weights as Hugging Face does: safetensors files up to a size, an index if there are several."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from infinity.checkpoint.disk import Disk, replace_file, told
from infinity.checkpoint.header import DTYPES, lay_out
from infinity.checkpoint.load import Reader, reader_of
from infinity.checkpoint.output_file import OutputFile
from infinity.checkpoint.read import Checkpoint
from infinity.checkpoint.writers import Writers
from infinity.device.lane import DONE, Ticket
from infinity.errors import CheckpointError
from infinity.memory.host import HostMemory

WINDOW_BYTES = 8 << 20
MAX_SHARD_BYTES = 5_000_000_000
"""What ``save_pretrained`` of transformers cuts at by default, too."""

INDEX = "model.safetensors.index.json"
OURS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?(\.incomplete)?")
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Weight:
    """One value to be written, in ``dtype``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Reader

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def chosen(dtype: str | None) -> torch.dtype | None:
    """The dtype that a name such as "bf16" means; None keeps each value's own."""
    if dtype is None:
        return None
    if dtype not in FORMATS:
        raise CheckpointError(f'dtype "{dtype}" is not known; expected one of {", ".join(FORMATS)}')
    return FORMATS[dtype]


def saved_weights(checkpoint: Checkpoint, wanted: torch.dtype | None, *, trainable_only: bool) -> Iterator[Weight]:
    """The weights of a checkpoint, tied ones once, then its buffers unless only trained weights are wanted."""
    manifest = checkpoint.manifest
    for name, parameter in manifest.parameters.items():
        unit = manifest.units[parameter.unit]
        if trainable_only and not unit.trainable:
            continue
        own = DTYPES[unit.dtype]
        dtype = own if wanted is None or not own.is_floating_point else wanted
        reader = checkpoint.reader(parameter, checkpoint.value_kind(parameter))
        yield Weight(name, tuple(parameter.shape), dtype, reader)
    if not trainable_only:
        for name in manifest.buffers:
            buffer = checkpoint.buffer(name)
            yield Weight(name, tuple(buffer.shape), buffer.dtype, reader_of(buffer))


def floating_dtype(weights: Iterable[Weight]) -> torch.dtype | None:
    """The dtype of the first weight that has digits after the point, which is that of all in an export."""
    return next((weight.dtype for weight in weights if weight.dtype.is_floating_point), None)


def write_weights(
    directory: str | os.PathLike[str], weights: Iterable[Weight], max_shard_bytes: int, disk: Disk | None = None
) -> list[str]:
    """Writes ``weights`` in their order; returns the paths. Extra memory: two windows of 8 MiB.

    Files of an earlier export in ``directory`` are replaced when the new ones are complete.
    """
    disk, directory = disk or Disk(), os.path.abspath(directory)
    with told("cannot create", directory):
        os.makedirs(directory, mode=0o700, exist_ok=True)
    shards = _cut(list(weights), max_shard_bytes)
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    written = []
    try:
        for name, shard in zip(names, shards, strict=True):
            path = os.path.join(directory, name)
            written.append(f"{path}.incomplete")
            with told("cannot remove", written[-1]):
                disk.remove(written[-1])
            _write(disk, written[-1], shard)
    except BaseException:
        for path in written:
            with suppress(OSError):
                disk.remove(path)
        raise
    for path in written:
        with told("cannot rename", path):
            disk.rename(path, path.removesuffix(".incomplete"))
    if len(shards) > 1:
        total = sum(weight.nbytes for shard in shards for weight in shard)
        where = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        replace_file(disk, os.path.join(directory, INDEX), json.dumps(index, indent=2).encode() + b"\n")
        names.append(INDEX)
    for stale in set(os.listdir(directory)) - set(names):
        if OURS.fullmatch(stale):
            with told("cannot remove", stale):
                disk.remove(os.path.join(directory, stale))
    with told("cannot make durable", directory):
        disk.sync_directory(directory)
    return [os.path.join(directory, name) for name in names]


def _cut(weights: Sequence[Weight], limit: int) -> list[list[Weight]]:
    shards: list[list[Weight]] = [[]]
    used = 0
    for weight in weights:
        if shards[-1] and used + weight.nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(weight)
        used += weight.nbytes
    return shards


def _write(disk: Disk, path: str, weights: Sequence[Weight]) -> None:
    header, _, nbytes = lay_out([(weight.name, weight.dtype, weight.shape) for weight in weights], {"format": "pt"})
    writers = Writers(1)
    windows: list[tuple[HostMemory, Ticket]] = [(HostMemory(WINDOW_BYTES), DONE) for _ in range(2)]
    file = None
    try:
        file = OutputFile(disk, path, nbytes, writers, direct=False)
        file.append_header(header)
        for weight in weights:
            piece = WINDOW_BYTES // weight.dtype.itemsize
            for start in range(0, weight.numel, piece):
                memory, busy = windows.pop(0)
                windows.append((memory, busy))
                busy.wait()
                count = min(piece, weight.numel - start)
                window = memory.bytes[: count * weight.dtype.itemsize]
                weight.read(start, window.view(weight.dtype))
                windows[-1] = memory, file.append(window)
        file.finish().wait()
    finally:
        writers.close()
        if file is not None:
            file.abandon()
        for memory, _ in windows:
            memory.free()
