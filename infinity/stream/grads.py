"""Sums each unit's gradients in fp32 on the tier they live on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from infinity._native.cpu_adam import Kernels
from infinity.device.lane import DONE, Ticket
from infinity.memory.arena import Slab, SlabPool
from infinity.obs.ledger import Ledger
from infinity.shard.partition import Unit
from infinity.storage.store import Store


@dataclass(frozen=True)
class GradientSum:
    """The whole gradient's squared norm, as accumulated (scaled); ``culprit`` names a non-finite parameter."""

    squared: float
    culprit: str | None

    @property
    def finite(self) -> bool:
        return self.culprit is None


@dataclass
class Held:
    """A unit's accumulator in a staging slab."""

    slab: Slab
    arrived: Ticket = DONE


class GradStream:
    """Owner of the gradient accumulators, of which parameters have one in this step, of their norm.

    An accumulator is fp32 of the unit's flat layout. Where its home can be addressed gradients are added in place;
    else it passes through a staging slab: read back if the unit already has gradients in this step, written behind
    when the unit's backward ends or when another unit needs the slab. A parameter that nobody deposited for has no
    gradient at all, which is what the optimizer of a plain model sees as None.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        store: Store,
        pools: dict[int, SlabPool],
        slab_bytes: dict[int, int],
        kernels: Kernels,
        ledger: Ledger,
    ) -> None:
        self._units = units
        self._store = store
        self._pools = pools
        self._slab_bytes = slab_bytes
        self._kernels = kernels
        self._ledger = ledger
        self._has = {unit.index: bytearray(len(unit.layout.slots)) for unit in units if unit.trainable}
        self._held: dict[int, Held] = {}
        self._sums: dict[int, tuple[float, float, str | None]] = {}
        self._parts: dict[tuple[int, int], torch.Tensor] = {}
        self._keeps_open = False

    def expect(self, index: int) -> None:
        """Starts bringing back an accumulator that is about to be added to, if a slab is free."""
        if index in self._slab_bytes and index not in self._held and any(self._has.get(index, b"")):
            slab = self._pools[self._slab_bytes[index]].try_take()
            if slab is not None:
                self._hold(index, slab)

    def begin(self, call: object, indices: Iterable[int]) -> None:
        """Says that the backward of ``call`` is going to deposit for these units."""

    def finish(self, call: object, indices: Iterable[int], *, again: bool) -> None:
        """Says that it has; with ``again`` there may be another backward of the same call."""
        for index in indices:
            self.close(index)

    def deposit(self, index: int, slot: int, gradient: torch.Tensor) -> None:
        """Adds one parameter's gradient, in any floating dtype, to its accumulator."""
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        flat = gradient.detach().contiguous().view(-1)
        if flat.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            flat = flat.to(torch.float32)
        has = self._has[index]
        self._kernels.accumulate(self._part(index, slot), flat, first=not has[slot])
        has[slot] = 1

    def note(self, index: int, slot: int) -> None:
        """Says that a parameter has a gradient, of which no element is kept here."""
        self._has[index][slot] = 1

    @contextmanager
    def open_for_long(self) -> Iterator[None]:
        """Inside, an accumulator goes home only when another unit's is needed: its unit is to be used again at once."""
        self._keeps_open = True
        try:
            yield
        finally:
            self._keeps_open = False

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Inside, ranks need not exchange what is deposited."""
        yield

    def close(self, index: int) -> None:
        """Says that this unit's backward is over for now."""
        if index in self._held and not self._keeps_open:
            self._flush(index)

    def deposited(self, index: int) -> bytes:
        """One flag per slot: whether it has a gradient in this step."""
        return bytes(self._has[index])

    def total(self, numbers: bytes = b"") -> GradientSum:
        """The squared norm over every deposited gradient, summed in fp64 and rounded once.

        ``numbers`` are what every rank must be about to step with: JSON, an object.
        """
        parts, culprit = self.parts()
        return GradientSum(math.fsum(parts) if culprit is None else math.nan, culprit)

    def parts(self) -> tuple[list[float], str | None]:
        """Numbers whose sum is the squared norm, with the first parameter whose gradient is not finite."""
        for index in tuple(self._held):
            self._flush(index)
        parts: list[float] = []
        culprit: str | None = None
        for index, has in self._has.items():
            if not any(has):
                continue
            if index in self._slab_bytes:
                if index not in self._sums:
                    self._accumulator(index)
                    self._flush(index)
                hi, lo, first_bad = self._sums[index]
            else:
                hi, lo, first_bad = self._sum(index, self._accumulator(index))
            parts += (hi, lo)
            culprit = culprit or first_bad
        return parts, culprit

    def read(self, index: int, slot: int) -> torch.Tensor | None:
        """A copy of one parameter's accumulated gradient, fp32 in its shape, or None."""
        if not self._has[index][slot]:
            return None
        where = self._units[index].layout.slots[slot]
        value = self._accumulator(index)[where.offset : where.stop].clone().view(where.shape)
        self.close(index)
        return value

    def discard(self, index: int, slot: int) -> None:
        """Forgets one parameter's gradient."""
        self._has[index][slot] = 0
        self._sums.pop(index, None)

    def reset(self) -> None:
        """Forgets every gradient; accumulators are overwritten by the next deposit."""
        for index in tuple(self._held):
            held = self._held.pop(index)
            self._pools[self._slab_bytes[index]].put(held.slab, held.arrived)
        for has in self._has.values():
            has[:] = bytes(len(has))
        self._sums.clear()

    def forget(self) -> None:
        """Forgets every gradient, that of a unit under update too, as its values are replaced."""
        self.reset()

    def check_whole(self, what: str) -> None:
        """Raises if ``what`` would find weights in the middle of a step."""

    def settle(self) -> None:
        """Waits until every accumulator has reached its home."""
        for index in tuple(self._held):
            self._flush(index)
        self._store.settle()

    def _part(self, index: int, slot: int) -> torch.Tensor:
        """A parameter's own range of the accumulator, remembered where that has one place for good."""
        part = self._parts.get((index, slot))
        if part is None:
            where = self._units[index].layout.slots[slot]
            part = self._accumulator(index)[where.offset : where.stop]
            if not self._pools:
                self._parts[index, slot] = part
        return part

    def _accumulator(self, index: int) -> torch.Tensor:
        if index not in self._slab_bytes:
            home = self._store.resident(index)
            assert home is not None
            return home.view(torch.float32)
        held = self._held.get(index) or self._hold(index, self._slab_for(index))
        if not held.arrived.done():
            start = time.perf_counter()
            held.arrived.wait()
            self._ledger.stalled("gradient_read", time.perf_counter() - start)
        held.arrived.wait()
        return held.slab.memory[: self._units[index].layout.nbytes(torch.float32)].view(torch.float32)

    def _slab_for(self, index: int) -> Slab:
        pool = self._pools[self._slab_bytes[index]]
        same_size = [other for other in self._held if self._slab_bytes[other] == self._slab_bytes[index]]
        if len(same_size) == pool.count:
            self._flush(same_size[0])
        start = time.perf_counter()
        slab = pool.take()
        self._ledger.stalled("gradient_write", time.perf_counter() - start)
        return slab

    def _hold(self, index: int, slab: Slab) -> Held:
        if self._keeps_open:
            for other in tuple(self._held):
                self._flush(other)
        held = self._held[index] = Held(slab)
        layout = self._units[index].layout
        if any(self._has[index]):
            held.arrived = self._store.read(index, 0, slab.memory[: layout.nbytes(torch.float32)])
        else:
            flat = slab.memory[: layout.nbytes(torch.float32)].view(torch.float32)
            for start, stop in layout.gaps():
                flat[start:stop].zero_()
        return held

    def _flush(self, index: int) -> None:
        """Writes a held accumulator home; its norm is taken while it is in memory."""
        flat = self._accumulator(index)
        hi, lo, culprit = self._sum(index, flat)
        self._sums[index] = (hi, lo, culprit)
        written = self._store.write(index, 0, flat.view(torch.uint8))
        held = self._held.pop(index)
        self._pools[self._slab_bytes[index]].put(held.slab, written)

    def _sum(self, index: int, flat: torch.Tensor) -> tuple[float, float, str | None]:
        slots = self._units[index].layout.slots
        for slot, has in zip(slots, self._has[index], strict=True):
            if not has:
                flat[slot.offset : slot.stop].zero_()
        total = self._kernels.sum_of_squares(flat)
        if total.finite:
            return total.hi, total.lo, None
        culprits = (slot.name for slot in slots if not torch.isfinite(flat[slot.offset : slot.stop]).all())
        return total.hi, total.lo, next(culprits, slots[0].name)
