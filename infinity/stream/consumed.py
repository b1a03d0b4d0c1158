"""Hands each unit's gradient to its update as soon as backward has completed it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from infinity.device.lane import DONE, Ticket
from infinity.errors import CapacityError, NonFiniteError, OffloadedError, ScheduleError
from infinity.memory.arena import Slab
from infinity.storage.store import Access, Lease, MemoryLease
from infinity.stream.grads import GradientSum, GradStream, Held
from infinity.tier import Tier

REMEDY = "set infinity.update_in_backward to false"


class ConsumedGradients:
    """The gradients that updates are reading, by unit: what the updater knows as the store of gradients."""

    tier = Tier.HOST

    def __init__(self) -> None:
        self.flats: dict[int, torch.Tensor] = {}

    def lease(self, unit: int, start: int, stop: int, access: Access) -> Lease:
        return MemoryLease(self.flats[unit].view(torch.uint8)[start:stop])

    def resident(self, unit: int) -> torch.Tensor | None:
        return None

    def is_settled(self, unit: int) -> bool:
        return True

    def read(self, unit: int, start: int, into: torch.Tensor) -> Ticket:
        into.copy_(self.flats[unit].view(torch.uint8)[start : start + into.numel()])
        return DONE

    def write(self, unit: int, start: int, source: torch.Tensor) -> Ticket:
        raise OffloadedError("a gradient that is consumed in backward cannot be written")

    def settle(self) -> None:
        pass


class ConsumedGradStream(GradStream):
    """Gradients that live from a unit's first deposit to its update, in slabs that units take turns in.

    A unit's gradient is complete when no call that used the unit in forward has its backward before it. Calls are
    known by reference: one whose graph was dropped is not waited for. What is not complete by then is complete at
    ``total``. ``consume`` begins the update of a unit; its slab is free again when that is done.
    """

    consume: Callable[[int], Ticket | None]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert isinstance(self._store, ConsumedGradients)
        self._consumed_by = self._store
        self._calls: dict[int, WeakSet[Any]] = {index: WeakSet() for index in self._has}
        self._begun: set[int] = set()

    def begin(self, call: object, indices: Iterable[int]) -> None:
        for index in indices:
            if index in self._calls:
                self._calls[index].add(call)

    def finish(self, call: object, indices: Iterable[int], *, again: bool) -> None:
        if again:
            return
        for index in indices:
            calls = self._calls.get(index)
            if calls is None:
                continue
            calls.discard(call)
            if not calls and index in self._held:
                self._flush(index)

    def expect(self, index: int) -> None:
        """Nothing is ever brought back."""

    def close(self, index: int) -> None:
        """A gradient is held until it is complete."""

    @contextmanager
    def open_for_long(self) -> Iterator[None]:
        yield

    def total(self, numbers: bytes = b"") -> GradientSum:
        found = super().total(numbers)
        for calls in self._calls.values():
            calls.clear()
        return found

    def read(self, index: int, slot: int) -> torch.Tensor | None:
        self._refuse(index, "cannot be read any more")
        return super().read(index, slot)

    def discard(self, index: int, slot: int) -> None:
        self._refuse(index, "cannot be dropped any more")
        super().discard(index, slot)

    def reset(self) -> None:
        for index in self._begun:
            self._refuse(index, "cannot be dropped any more")
        super().reset()

    def forget(self) -> None:
        for calls in self._calls.values():
            calls.clear()
        self._begun.clear()
        super().forget()

    def check_whole(self, what: str) -> None:
        if self._begun:
            raise ScheduleError(
                f"{what} was called between backward(), which has updated {len(self._begun)} units, and step(): "
                f"weights are in the middle of a step. Call step() first, load a whole checkpoint, or {REMEDY}"
            )

    def taken(self) -> list[int]:
        """The units whose update was begun in this step, which is over now."""
        begun, self._begun = sorted(self._begun), set()
        return begun

    def settle(self) -> None:
        """Accumulators have no other home."""

    def _refuse(self, index: int, what: str) -> None:
        if index in self._begun:
            raise ScheduleError(
                f'the gradient of unit "{self._units[index].name}" {what}: backward has begun its update. Call step() '
                f"after every backward(), or {REMEDY}"
            )

    def _hold(self, index: int, slab: Slab) -> Held:
        if index in self._begun:
            self._pools[self._slab_bytes[index]].put(slab)
            raise ScheduleError(
                f'unit "{self._units[index].name}" got a gradient after its update had begun in backward. Call step() '
                f"after every backward(), or {REMEDY}"
            )
        return super()._hold(index, slab)

    def _slab_for(self, index: int) -> Slab:
        pool = self._pools[self._slab_bytes[index]]
        open_units = [other for other in self._held if self._slab_bytes[other] == self._slab_bytes[index]]
        if len(open_units) == pool.count:
            names = ", ".join(f'"{self._units[other].name}"' for other in open_units)
            raise CapacityError(
                f'host memory: the gradient of unit "{self._units[index].name}" needs {pool.nbytes} bytes, but every '
                f"slab is with {names}, used again before that gradient is complete: by a call whose backward is to "
                "come, or whose graph is kept (a logged loss, a checkpoint around a unit). Let go of that graph, place "
                f"gradients in host memory, or {REMEDY}"
            )
        return super()._slab_for(index)

    def _flush(self, index: int) -> None:
        flat = self._accumulator(index)
        hi, lo, culprit = self._sum(index, flat)
        if culprit is not None:
            raise NonFiniteError(
                f"the gradient of {culprit} is not finite, and {len(self._begun)} units have been updated in this "
                f"backward already, so the step cannot be skipped. Go back to a checkpoint, or {REMEDY}"
            )
        self._sums[index] = (hi, lo, culprit)
        held = self._held.pop(index)
        self._consumed_by.flats[index] = flat
        self._begun.add(index)
        self._pools[self._slab_bytes[index]].put(held.slab, self.consume(index))
