"""Which part of a unit's flat buffer each rank owns."""

from __future__ import annotations

from dataclasses import replace

from infinity.shard.layout import FlatLayout, Slot
from infinity.shard.partition import Unit


def shard_range(layout: FlatLayout, rank: int) -> tuple[int, int]:
    """First element of the slice of ``rank``, the element behind its last: whole pages in every dtype in use."""
    return rank * layout.shard_numel, (rank + 1) * layout.shard_numel


def shard_of(unit: Unit, rank: int) -> Unit:
    """The slice of ``unit`` that ``rank`` owns, as a unit with a flat buffer of its own.

    It has as many slots as the whole, numbered alike, each cut to what lies in the slice: one-dimensional, from
    element ``first`` of the parameter on, without elements if all of it lies elsewhere. With one rank it is ``unit``.
    """
    layout = unit.layout
    if layout.world_size == 1:
        return unit
    start, stop = shard_range(layout, rank)
    slots = tuple(_clipped(slot, start, stop) for slot in layout.slots)
    return replace(unit, layout=FlatLayout(layout.dtype, slots, layout.shard_numel))


def _clipped(slot: Slot, start: int, stop: int) -> Slot:
    begin = min(max(slot.offset, start), stop)
    end = max(min(slot.stop, stop), begin)
    first = begin - slot.offset if end > begin else 0
    return Slot(slot.name, (end - begin,), begin - start, end - begin, first)
