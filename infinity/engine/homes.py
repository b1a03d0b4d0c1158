"""Single parameters where they are kept, be it whole or in slices of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from infinity.comm import Group
from infinity.engine.streamed import FlatWriter, read_slot, write_slot
from infinity.plan.placement import Placement
from infinity.shard.partition import Unit
from infinity.storage.store import Store
from infinity.stream.exchange import assembled
from infinity.tier import StateKind


@dataclass(frozen=True)
class Homes:
    """Where each kind of state is: in ``stores`` as it is kept, in ``slice_stores`` this rank's slice of it alone.

    ``slices`` are this rank's slices of the units. With one rank they are the units, and both stores are one.
    """

    group: Group
    placement: Placement
    units: Sequence[Unit]
    slices: Sequence[Unit]
    stores: dict[StateKind, Store] = field(default_factory=dict)
    slice_stores: dict[StateKind, Store] = field(default_factory=dict)

    def unit(self, kind: StateKind, index: int) -> Unit:
        """What of a unit this rank keeps of ``kind``: all of it, or its slice."""
        return (self.units if kind in self.placement.whole else self.slices)[index]

    def read(self, kind: StateKind, index: int, slot: int) -> torch.Tensor:
        """A copy of one parameter's state in its shape, in RAM; a collective where ranks have slices of it."""
        unit = self.unit(kind, index)
        own = read_slot(self.stores[kind], unit, unit.layout.slots[slot], self.placement.dtype(kind, unit))
        if unit is self.units[index]:
            return own
        return assembled(self.group, f"{kind.value} of {unit.layout.slots[slot].name}", self.units[index], slot, own)

    def write(self, kind: StateKind, index: int, slot: int, value: torch.Tensor) -> None:
        """Replaces what this rank keeps of one parameter's state; every rank must give the same ``value``."""
        unit = self.unit(kind, index)
        write_slot(self.stores[kind], unit, unit.layout.slots[slot], self.placement.dtype(kind, unit), value)

    def writer(self, kind: StateKind, index: int) -> FlatWriter:
        """Writes what this rank keeps of a unit from whole parameters, one after the other."""
        unit = self.unit(kind, index)
        return FlatWriter(self.stores[kind], unit, self.placement.dtype(kind, unit))
