"""Weights alone: taken from files that others made, written for others to read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from infinity.checkpoint.export import Weight, chosen, write_weights
from infinity.checkpoint.load import Difference, Reader, StateReader, compare, parameter_names, reader_of
from infinity.checkpoint.save import together
from infinity.checkpoint.weights import Weights
from infinity.engine.persistence import (
    Training,
    changing,
    fill,
    loading,
    names_of,
    persistent_buffers,
    slots_of,
    state_writer,
    value_kinds,
)
from infinity.shard.partition import Unit
from infinity.tier import StateKind


def load_weights(
    training: Training, source: str | os.PathLike[str] | Mapping[str, torch.Tensor], *, strict: bool
) -> Difference:
    """Streams weights onto the tiers, fp32 masters included; moments, counters, everything else stay as they are."""
    with loading(training, strict=strict), Weights(source) as weights:
        names = names_of(training)
        weights.without_prefix(alias for aliases in names.values() for alias in aliases)
        shapes = {name: tuple(slot.shape) for name, slot in slots_of(training).items()}
        buffers = persistent_buffers(training.module)
        shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
        names |= {name: [name] for name in buffers}
        found, difference = compare(shapes, names, weights.shapes, weights.owner)
        difference.check(weights.name, strict=strict)
        with changing(training), state_writer(training) as writer:
            for unit in training.parts.partition.units:
                own = {number: slot.name for number, slot in enumerate(unit.layout.slots) if slot.name in found}
                readers = {number: weights.reader(found[name]) for number, name in own.items()}
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
    for name in ("config", "generation_config"):
        write: Any = getattr(getattr(training.module, name, None), "save_pretrained", None)
        if callable(write):
            write(os.fspath(directory))
    return paths


def _weights(
    training: Training, reader: StateReader, wanted: torch.dtype | None, *, trainable_only: bool
) -> Iterator[Weight]:
    tied = set(getattr(training.module, "_tied_weights_keys", None) or ())
    for unit in training.parts.partition.units:
        if trainable_only and not unit.trainable:
            continue
        for number, slot in enumerate(unit.layout.slots):
            names = parameter_names(unit, number)
            name = next((name for name in names if name not in tied), names[0])
            floating = unit.layout.dtype.is_floating_point
            dtype = unit.layout.dtype if wanted is None or not floating else wanted
            kind = StateKind.PARAM if dtype == unit.layout.dtype else value_kinds(training, unit)[0]
            read = reader.reader(unit, number, kind)
            if training.parts.homes.unit(kind, unit.index) is not unit:
                read = _gathered(training, unit, number, kind)
            yield Weight(name, slot.shape, dtype, read)
    if not trainable_only:
        for name, buffer in persistent_buffers(training.module).items():
            yield Weight(name, tuple(buffer.shape), buffer.dtype, reader_of(buffer.detach().cpu()))


def _gathered(training: Training, unit: Unit, slot: int, kind: StateKind) -> Reader:
    """Reads a parameter of which ranks have slices: gathers the whole of it when its first element is asked for."""
    held: list[torch.Tensor] = []

    def read(start: int, into: torch.Tensor) -> None:
        if start == 0:
            held[:] = [training.parts.homes.read(kind, unit.index, slot).view(-1)]
        into.copy_(held[0][start : start + into.numel()])
        if start + into.numel() == held[0].numel():
            held.clear()

    return read


def _only_gather(weights: Iterable[Weight]) -> None:
    """What ranks that do not write do meanwhile: their part of each gather."""
    for weight in weights:
        if weight.numel:
            weight.read(0, torch.empty(weight.numel, dtype=weight.dtype))
