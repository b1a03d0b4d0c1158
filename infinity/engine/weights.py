"""Weights alone: taken from files that others made, written for others to read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

import torch

from infinity.checkpoint.export import WINDOW_BYTES, Weight, chosen, floating_dtype, write_weights
from infinity.checkpoint.load import Difference, Reader, StateReader, compare, reader_of
from infinity.checkpoint.model_config import config_files, write_config_files
from infinity.checkpoint.pieces import piece_reader
from infinity.checkpoint.save import together
from infinity.checkpoint.weights import Weights
from infinity.engine.persistence import (
    Training,
    changing,
    fill,
    loading,
    persistent_buffers,
    shapes_of,
    state_writer,
    value_kinds,
)
from infinity.shard.tiles import Piece, whole_piece
from infinity.tier import StateKind


def load_weights(
    training: Training, source: str | os.PathLike[str] | Mapping[str, torch.Tensor], *, strict: bool
) -> Difference:
    """Streams weights onto the tiers, fp32 masters included; moments, counters, everything else stay as they are."""
    partition = training.parts.partition
    with loading(training, strict=strict), Weights(source) as weights:
        names = partition.names
        weights.without_prefix(alias for aliases in names.values() for alias in aliases)
        shapes = shapes_of(training)
        buffers = persistent_buffers(training.module)
        shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
        names |= {name: [name] for name in buffers}
        found, difference = compare(shapes, names, weights.shapes, weights.owner)
        difference.check(weights.name, strict=strict)
        given: dict[int, list[Piece]] = {}
        for piece in (piece for name, pieces in partition.pieces.items() if name in found for piece in pieces):
            given.setdefault(piece.unit, []).append(piece)
        with changing(training), state_writer(training) as writer:
            for unit in partition.units:
                own = given.get(unit.index, ())
                readers = {piece.slot: weights.reader(found[piece.name], piece) for piece in own}
                fill(training, writer, unit, value_kinds(training, unit), readers)
            for name, buffer in buffers.items():
                if name in found:
                    value = torch.empty_like(buffer, device="cpu", memory_format=torch.contiguous_format)
                    weights.reader(found[name])(0, value.view(-1))
                    with torch.no_grad():
                        buffer.copy_(value)
        return difference


def save_pretrained(
    training: Training,
    directory: str | os.PathLike[str],
    max_shard_bytes: int,
    dtype: str | None,
    *,
    trainable_only: bool,
) -> list[str]:
    """Writes the weights under one name each, tied ones as Hugging Face does, with the model's own config."""
    wanted, runtime, group = chosen(dtype), training.runtime, training.parts.group
    with runtime.alone(), runtime.watched():
        runtime.settle()
        reader = StateReader(training.parts.plan.placement, training.parts.homes.stores)
        try:
            weights = list(_weights(training, reader, wanted, trainable_only=trainable_only))
            if group.rank:
                together(group, "writing weights", lambda: _only_gather(weights))
                return []
            paths = together(group, "writing weights", lambda: write_weights(directory, weights, max_shard_bytes))
        finally:
            reader.free()
    return paths + write_config_files(directory, config_files(training.module), floating_dtype(weights))


def _weights(
    training: Training, reader: StateReader, wanted: torch.dtype | None, *, trainable_only: bool
) -> Iterator[Weight]:
    tied = set(getattr(training.module, "_tied_weights_keys", None) or ())
    partition = training.parts.partition
    names = partition.names
    for first, pieces in partition.pieces.items():
        unit = partition.units[pieces[0].unit]
        if trainable_only and not unit.trainable:
            continue
        name = next((name for name in names[first] if name not in tied), first)
        floating = unit.layout.dtype.is_floating_point
        dtype = unit.layout.dtype if wanted is None or not floating else wanted
        kind = StateKind.PARAM if dtype == unit.layout.dtype else value_kinds(training, unit)[0]
        sources = [(piece, _slot(training, reader, piece, kind)) for piece in pieces]
        yield Weight(name, pieces[0].shape, dtype, piece_reader(whole_piece(pieces[0].shape), sources))
    if not trainable_only:
        for name, buffer in persistent_buffers(training.module).items():
            yield Weight(name, tuple(buffer.shape), buffer.dtype, reader_of(buffer.detach().cpu()))


def _slot(training: Training, reader: StateReader, piece: Piece, kind: StateKind) -> Reader:
    """Reads the slot of a piece; where ranks have slices of it, gathers all when the first element is asked for."""
    unit, homes = training.parts.partition.units[piece.unit], training.parts.homes
    if homes.unit(kind, unit.index) is unit:
        return reader.reader(unit, piece.slot, kind)
    held: list[torch.Tensor] = []

    def read(start: int, into: torch.Tensor) -> None:
        if start == 0:
            held[:] = [homes.read(kind, unit.index, piece.slot).view(-1)]
        into.copy_(held[0][start : start + into.numel()])
        if start + into.numel() == held[0].numel():
            held.clear()

    return read


def _only_gather(weights: Iterable[Weight]) -> None:
    """What ranks that do not write do meanwhile: their part of each gather, in the order in which the writer asks."""
    for weight in weights:
        piece = WINDOW_BYTES // weight.dtype.itemsize
        for start in range(0, weight.numel, piece):
            weight.read(start, torch.empty(min(piece, weight.numel - start), dtype=weight.dtype))
