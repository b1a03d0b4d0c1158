"""One allocation per tier, carved into regions by the plan."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

import torch

from infinity.device.lane import Ticket
from infinity.errors import CapacityError
from infinity.tier import PAGE_BYTES, Tier, round_up


class Arena:
    """A tier's bulk memory: a fixed number of bytes that the plan hands out by purpose.

    ``peak`` is the most bytes that were in use at once, ``allocations`` how often a region was carved: after the
    engine is built it must not move again. ``residents`` are the bytes in use for good, by purpose;
    ``regions`` all that was carved.
    """

    def __init__(self, tier: Tier, memory: torch.Tensor) -> None:
        self.tier = tier
        self.capacity = memory.numel()
        self.carved = 0
        self.allocations = 0
        self.in_use = 0
        self.peak = 0
        self.residents: dict[str, int] = {}
        self.regions: list[torch.Tensor] = []
        self._memory = memory
        self._lock = threading.Lock()

    def carve(self, nbytes: int, purpose: str) -> torch.Tensor:
        """A page-aligned region of ``nbytes`` as uint8, for as long as the arena lives."""
        padded = round_up(nbytes, PAGE_BYTES)
        if self.carved + padded > self.capacity:
            raise CapacityError(
                f"{purpose} needs {padded} bytes of {self.tier.value} memory but the plan left "
                f"{self.capacity - self.carved} of {self.capacity}"
            )
        # .data, because views share a version counter: a write to one region would make autograd refuse all others.
        region = self._memory[self.carved : self.carved + nbytes].data
        self.regions.append(region)
        self.carved += padded
        self.allocations += 1
        return region

    def occupy(self, nbytes: int) -> None:
        """Counts bytes as in use."""
        with self._lock:
            self.in_use += round_up(nbytes, PAGE_BYTES)
            self.peak = max(self.peak, self.in_use)

    def vacate(self, nbytes: int) -> None:
        """Counts bytes as free again."""
        with self._lock:
            self.in_use -= round_up(nbytes, PAGE_BYTES)

    def resident(self, nbytes: int, purpose: str) -> torch.Tensor:
        """A region that is in use from now on."""
        self.occupy(nbytes)
        self.residents[purpose] = self.residents.get(purpose, 0) + round_up(nbytes, PAGE_BYTES)
        return self.carve(nbytes, purpose)

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of this arena's memory."""
        start = self._memory.data_ptr()
        return start <= tensor.data_ptr() < start + self.capacity


@dataclass(eq=False)
class Slab:
    """A reusable region; ``free_after`` is the last asynchronous entry that still touches it."""

    memory: torch.Tensor
    free_after: Ticket | None = field(default=None)


class SlabPool:
    """Equal slabs of one arena, lent in the order in which they come back, those that are ready first.

    ``poison`` overwrites a slab with NaN bytes when it comes back, so that a test sees any use after release.
    """

    def __init__(self, arena: Arena, count: int, nbytes: int, purpose: str, *, poison: bool = False) -> None:
        self.count = count
        self.nbytes = nbytes
        self.purpose = purpose
        self._arena = arena
        self._poison = poison
        self._free = deque(Slab(arena.carve(nbytes, purpose)) for _ in range(count))
        self._returned = threading.Condition()

    def try_take(self) -> Slab | None:
        """A free slab, or None at once if all are lent."""
        with self._returned:
            if not self._free:
                return None
            slab = self._next()
        return self._ready(slab)

    def take(self) -> Slab:
        """A free slab; blocks until another thread returns one."""
        with self._returned:
            while not self._free:
                self._returned.wait()
            slab = self._next()
        return self._ready(slab)

    def put(self, slab: Slab, free_after: Ticket | None = None) -> None:
        """Returns a slab; the next taker waits for ``free_after``, until when the slab counts as in use."""
        slab.free_after = free_after
        if free_after is None:
            self._vacate(slab)
        with self._returned:
            self._free.append(slab)
            self._returned.notify()

    def _next(self) -> Slab:
        for slab in self._free:
            if slab.free_after is None or slab.free_after.done():
                self._free.remove(slab)
                return slab
        return self._free.popleft()

    def _ready(self, slab: Slab) -> Slab:
        if slab.free_after is not None:
            ticket, slab.free_after = slab.free_after, None
            try:
                ticket.wait()
            except BaseException:
                self.put(slab)
                raise
            self._vacate(slab)
        self._arena.occupy(self.nbytes)
        return slab

    def _vacate(self, slab: Slab) -> None:
        if self._poison:
            slab.memory.fill_(0xFF)
        self._arena.vacate(self.nbytes)
