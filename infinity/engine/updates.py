"""Begins the updates of a step: all of them at its end, or each as soon as backward has the unit's gradient."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from infinity.device.lane import Ticket
from infinity.engine.bound_unit import BoundUnit
from infinity.engine.build import Parts
from infinity.errors import ScheduleError
from infinity.optim.facade import StreamedOptimizer
from infinity.optim.steps import Steps
from infinity.optim.updater import UnitUpdate
from infinity.stream.consumed import REMEDY, ConsumedGradStream
from infinity.tier import StateKind, Tier


class Updates(Protocol):
    """What ``step()`` asks for the updates of every unit that has a gradient."""

    def begin(self, grad_scale: float) -> dict[int, Ticket]:
        """Sees to it that all are under way, gradients multiplied by ``grad_scale``; tickets of those just begun."""
        ...


def updates_of(parts: Parts, units: Sequence[BoundUnit], steps: Steps, optimizer: StreamedOptimizer) -> Updates:
    """The kind that the plan was made for."""
    if isinstance(parts.grads, ConsumedGradStream):
        return InBackward(parts, parts.grads, units, steps, optimizer)
    return AtStep(parts, units, steps, optimizer)


class AtStep:
    """Every update begins in ``step()``, when the gradient's norm over all units is known."""

    def __init__(self, parts: Parts, units: Sequence[BoundUnit], steps: Steps, optimizer: StreamedOptimizer) -> None:
        self._parts, self._units, self._steps, self._optimizer = parts, units, steps, optimizer

    def begin(self, grad_scale: float) -> dict[int, Ticket]:
        updates = []
        for index in self._parts.params.forward_order():
            unit = self._parts.updated[index]
            if not unit.trainable:
                continue
            deposited = self._parts.grads.deposited(index)
            self._steps.count(unit, deposited)
            update = self._steps.update_of(unit, deposited, self._optimizer, grad_scale)
            if update is None and any(deposited) and self._parts.group.world_size > 1:
                update = UnitUpdate(unit, ())  # what has a gradient is in the slices of other ranks
            if update is not None:
                updates.append(update)
        tickets = self._parts.updater.start(updates)
        for update in updates:
            self._units[update.unit.index].changed()
        return tickets


class InBackward:
    """A unit's update begins when its gradient is complete, so that it is hidden behind the rest of backward.

    Nothing may depend on gradients that come later: no clipping, no loss scale that could overflow, no accumulation.
    """

    def __init__(
        self,
        parts: Parts,
        grads: ConsumedGradStream,
        units: Sequence[BoundUnit],
        steps: Steps,
        optimizer: StreamedOptimizer,
    ) -> None:
        self._parts, self._grads, self._units, self._steps = parts, grads, units, steps
        self._optimizer = weakref.ref(optimizer)  # which knows the engine, which must be free to go
        self._begun: dict[int, UnitUpdate] = {}
        self._order: list[int] = []
        # Then the next forward can begin while updates that it needs later are still to come. Where units take turns
        # in a few slabs, though, backward waits for the update that was begun first.
        self._soonest_first = parts.plan.placement[StateKind.GRAD] is not Tier.NVME
        grads.consume = self._consume

    def begin(self, grad_scale: float) -> dict[int, Ticket]:
        self._parts.updater.reorder(self._order or self._parts.params.forward_order())
        self._order = []
        for index in self._grads.taken():
            update = self._begun.pop(index, None)
            if update is not None and update != self._update_of(index):
                raise ScheduleError(
                    "a number of a parameter group was changed between backward() and step(), when updates with the "
                    f"old one had begun. Change it before backward, or {REMEDY}"
                )
        return {}

    def _consume(self, index: int) -> Ticket | None:
        self._steps.count(self._units[index].unit, self._grads.deposited(index))
        update = self._update_of(index)
        if update is None:
            return None
        self._begun[index] = update
        ticket = self._parts.updater.start([update])[index]
        if self._soonest_first:
            self._order = self._order or self._parts.params.forward_order()
            self._parts.updater.reorder(self._order)
        self._units[index].changed()
        self._parts.params.begin_update(index, ticket)
        return ticket

    def _update_of(self, index: int) -> UnitUpdate | None:
        optimizer = self._optimizer()
        assert optimizer is not None
        return self._steps.update_of(self._units[index].unit, self._grads.deposited(index), optimizer, 1.0)
