"""Brings each unit's parameters together from all ranks just before use."""

from __future__ import annotations

from typing import Any

import torch

from infinity.comm import Group
from infinity.device.lane import Ticket
from infinity.memory.host import HostMemory
from infinity.stream.params import ParamStream


class GatheredParams(ParamStream):
    """A ``ParamStream`` whose units' homes hold this rank's slice.

    The slice is read straight into its place in the slab; one all-gather, in place, fills in the others. Which units
    are fetched when depends on the order of uses alone, never on timing, so all ranks gather the same in the same
    order. A unit that kept its slab is not gathered again.
    """

    def __init__(self, group: Group, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._group = group

    def _read(self, index: int, into: torch.Tensor) -> Ticket:
        own = into.chunk(self._group.world_size)[self._group.rank]
        return self._group.gather(index, self._units[index].name, into, super()._read(index, own))

    def slice_of(self, index: int) -> torch.Tensor:
        """This rank's slice of a unit (uint8), for others who gather it when this rank does not."""
        update = self._updates.get(index)
        if update is not None:
            update.wait()
        home = self._store.resident(index)
        if home is None:
            home = HostMemory(self._units[index].layout.shard_nbytes()).bytes
            self._store.read(index, 0, home).wait()
        return home
