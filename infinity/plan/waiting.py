"""Chooses which blocks keep their activations, where the inputs of the others wait for backward."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

from infinity.plan.micro_batch import WINDOW_CALLS, MicroBatch
from infinity.tier import PAGE_BYTES, Tier

Rehearsal = Callable[[frozenset[str], frozenset[str]], MicroBatch]
"""What a micro-batch takes if the first units (by path) are recomputed, the inputs of the second leave the device."""


@dataclass(frozen=True)
class Waiting:
    """What waits for backward, where: ``micro_batch`` is that of this choice.

    ``kept`` are units that would be recomputed but keep their activations, ``staying`` recomputed ones whose inputs
    stay on the device. ``device`` are the bytes of both beyond what any choice takes, which is ``outside`` of all
    budgets; ``host`` with ``nvme`` are those of inputs that leave for ``tier``.
    """

    micro_batch: MicroBatch
    tier: Tier
    outside: int
    kept: frozenset[str] = frozenset()
    staying: frozenset[str] = frozenset()
    together: int = 1
    """Micro-batches that wait at once."""
    device: int = 0
    host: int = 0
    nvme: int = 0
    window: int | None = None
    """Bytes of host memory through which inputs go to NVMe; None where the first step finds out how many."""

    def told(self) -> list[str]:
        """The choice in words; none where there was nothing to choose."""
        lines = []
        if self.kept:
            lines.append(f"kept instead of recomputed: {_told(self.kept, self.micro_batch)}")
        if self.staying:
            lines.append(f"recomputed, inputs on the device: {_told(self.staying, self.micro_batch)}")
        return lines


class Waits:
    """Rehearses a micro-batch for every choice that is thought about, none of them twice.

    ``again`` are the units that are recomputed unless the plan keeps them, which it may for those in ``free``.
    ``tier`` is where inputs wait; None leaves that to the plan, NVMe included if there is a directory to ``swap`` to.
    ``together`` micro-batches are in flight at once.
    """

    def __init__(
        self,
        rehearse: Rehearsal,
        again: Collection[str],
        free: Collection[str],
        tier: Tier | None,
        *,
        swap: bool,
        together: int,
    ) -> None:
        self._rehearse = cache(rehearse)
        self._again = frozenset(again)
        self._tier = tier
        self._swap = swap
        self._together = together
        order = [*self._floor().order, *sorted(self._again)]
        self._order = list(dict.fromkeys(path for path in order if path in self._again))
        self._free = [path for path in self._order if path in free]

    def within(self, device: int | None, host: int) -> Waiting:
        """The choice for so many bytes of device memory (None: no limit is known), of host memory.

        Blocks keep their activations as far as there is room, the last ones in forward first: theirs are needed
        soonest. Inputs of the others stay on the device while they fit, then on the host; the rest goes to NVMe.
        """
        if device is None:
            return self._chosen(0, 0, self._tier or Tier.DEVICE, None)
        device = device // PAGE_BYTES * PAGE_BYTES
        if self._tier is not None:
            kept = _largest(len(self._free), device, lambda count: self._device(count, 0))
            return self._chosen(kept, 0, self._tier, None)

        def attempt(kept: int) -> Waiting:
            rest = len(self._order) - kept
            staying = _largest(rest, device, lambda count: self._device(kept, count))
            near = self._chosen(kept, staying, Tier.HOST, None)
            if near.host <= host or not self._swap:
                return near
            return min(self._chosen(kept, staying, Tier.NVME, host), near, key=lambda found: found.host)

        high = _largest(len(self._free), device, lambda count: self._device(count, 0))
        found = attempt(high)
        if found.host <= host:
            return found
        low = 0  # fewer kept leave room on the device for more inputs, which the host has none for
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if attempt(middle).host <= host else (low, middle)
        return attempt(low)

    def _floor(self) -> MicroBatch:
        return self._rehearse(self._again, frozenset() if self._tier is Tier.DEVICE else self._again)

    def _choice(self, kept: int, staying: int) -> tuple[frozenset[str], frozenset[str]]:
        keeps = frozenset(self._free[len(self._free) - kept :])
        rest = [path for path in self._order if path not in keeps]
        return keeps, frozenset(rest[len(rest) - min(staying, len(rest)) :])

    def _run(self, kept: int, staying: int) -> MicroBatch:
        keeps, stay = self._choice(kept, staying)
        moved = frozenset() if self._tier is Tier.DEVICE else self._again - keeps - stay
        return self._rehearse(self._again - keeps, moved)

    def _device(self, kept: int, staying: int) -> int:
        return self._together * max(0, self._run(kept, staying).outside - self._floor().outside)

    def _chosen(self, kept: int, staying: int, tier: Tier, room: int | None) -> Waiting:
        if tier is Tier.DEVICE and self._tier is None:
            staying = len(self._order)
        keeps, stay = self._choice(kept, staying)
        batch = self._run(kept, staying)
        window = None
        if self._tier is None and tier is Tier.NVME and room is not None:
            window = max(room // PAGE_BYTES * PAGE_BYTES, WINDOW_CALLS * batch.largest_call)
        host, nvme = batch.away(tier, self._together, window)
        extra = max(0, batch.outside - self._floor().outside)
        return Waiting(
            batch, tier if host or self._tier else Tier.DEVICE, batch.outside - extra, keeps, stay, self._together,
            extra * self._together, host, nvme, window if nvme else None,
        )  # fmt: skip


def _largest(most: int, room: int, cost: Callable[[int], int]) -> int:
    """The largest count up to ``most`` whose cost, which grows with it almost evenly, is within ``room``; 0 if none."""
    low, high = 0, most
    below, above = cost(low), cost(high)
    if above <= room:
        return high
    while high - low > 1:
        guess = low + (high - low) * max(0, room - below) // max(1, above - below)
        guess = min(max(guess, low + 1), high - 1)
        value = cost(guess)
        if value <= room:
            low, below = guess, value
        else:
            high, above = guess, value
    return low


def _told(paths: Collection[str], batch: MicroBatch) -> str:
    """So many units, the first, the last of them."""
    order = [path for path in batch.order if path in paths]
    if not order:
        return f"{len(paths)} units"
    span = order[0] if len(order) == 1 else f"{order[0]} to {order[-1]}"
    return f"{len(order)} of {len(batch.order)} blocks, {span}"
