"""Says what one step does to one unit."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.optim.facade import StreamedOptimizer
from infinity.optim.updater import UnitUpdate, pieces_of
from infinity.shard.partition import Unit


class Steps:
    """How many steps every parameter has had, in which group it is.

    ``taken[unit, slot]`` counts the steps in which the parameter had a gradient; ``group_of[unit, slot]`` is the number
    of its parameter group.
    """

    def __init__(self, group_of: dict[tuple[int, int], int]) -> None:
        self.group_of = group_of
        self.taken: dict[tuple[int, int], int] = {}

    def count(self, unit: Unit, deposited: Sequence[int]) -> None:
        """Counts one more step of each parameter of ``unit`` that has a gradient."""
        for slot, has in enumerate(deposited):
            if has:
                self.taken[unit.index, slot] = self.taken.get((unit.index, slot), 0) + 1

    def update_of(
        self, unit: Unit, deposited: Sequence[int], optimizer: StreamedOptimizer, grad_scale: float
    ) -> UnitUpdate | None:
        """The update with the optimizer's numbers of this moment; None for a unit that has no gradient."""
        pieces = pieces_of(
            unit,
            deposited,
            lambda slot: optimizer.arguments(
                slot, self.group_of[unit.index, slot], self.taken[unit.index, slot], grad_scale
            ),
        )
        return UnitUpdate(unit, pieces) if pieces else None
