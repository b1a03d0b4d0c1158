"""Updates on several ranks: what each has updated goes to the others, or each has everything to update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infinity.comm import Group
from infinity.device.lane import DONE, Ticket
from infinity.optim.updater import UnitUpdate, Updater


class SlicedUpdater(Updater):
    """Updates this rank's slice of each unit, in which there may be nothing to update: stage 3."""

    def start(self, updates: Sequence[UnitUpdate]) -> dict[int, Ticket]:
        nothing = {update.unit.index: DONE for update in updates if not update.pieces}
        return {**nothing, **super().start([update for update in updates if update.pieces])}


class PublishingUpdater(SlicedUpdater):
    """Updates this rank's slice of each unit, then gathers the parameters of all: stages 1, 2.

    ``flats`` are the units' whole parameters (uint8), in which the slice lies that the rule writes to.
    """

    def __init__(self, group: Group, flats: Mapping[int, torch.Tensor], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._group = group
        self._flats = flats

    def start(self, updates: Sequence[UnitUpdate]) -> dict[int, Ticket]:
        tickets = super().start(updates)
        return {
            update.unit.index: self._group.gather(
                update.unit.index, update.unit.name, self._flats[update.unit.index], tickets[update.unit.index]
            )
            for update in updates
        }


class ReplicatedUpdater(Updater):
    """Gathers the sums of all slices, then updates whole units, on every rank the same: stage 0.

    ``flats`` are the units' whole gradients (uint8), in which this rank's slice has been summed over the ranks.
    """

    def __init__(self, group: Group, flats: Mapping[int, torch.Tensor], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._group = group
        self._flats = flats

    def start(self, updates: Sequence[UnitUpdate]) -> dict[int, Ticket]:
        gathered = [
            self._group.gather(update.unit.index, update.unit.name, self._flats[update.unit.index], DONE)
            for update in updates
        ]
        for ticket in gathered:
            ticket.wait()
        return super().start(updates)
