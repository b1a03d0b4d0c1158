"""Reads or writes single parameters of a store that deals in whole pages."""

from __future__ import annotations

import torch

from infinity.memory.host import HostMemory
from infinity.shard.layout import Slot
from infinity.shard.partition import Unit
from infinity.storage.store import Store
from infinity.tier import PAGE_BYTES, round_up

WINDOW_BYTES = 8 << 20


class FlatWriter:
    """Writes the slots of a unit, or of a rank's slice of it, in order, through a window of a few megabytes.

    Gaps become zeros.
    """

    def __init__(self, store: Store, unit: Unit, dtype: torch.dtype) -> None:
        self._store, self._unit, self._dtype = store, unit, dtype
        self._total = unit.layout.nbytes(dtype)
        self._window = HostMemory(min(self._total, WINDOW_BYTES))
        self._flat = self._window.bytes.view(dtype)
        self._start = 0
        self._filled = 0

    def write(self, slot: Slot, value: torch.Tensor) -> None:
        """Appends what lies in the slot of a whole parameter's values (1-D, any dtype)."""
        self._pad(slot.offset)
        value = value[slot.first : slot.first + slot.numel]
        done = 0
        while done < slot.numel:
            take = min(slot.numel - done, self._room())
            self._flat[self._filled : self._filled + take].copy_(value[done : done + take])
            self._filled += take
            done += take

    def close(self) -> None:
        """Writes what is left, then frees the window."""
        self._pad(self._unit.layout.numel)
        self._flush()
        self._flat = torch.empty(0)
        self._window.free()

    def _pad(self, position: int) -> None:
        while self._start + self._filled < position:
            take = min(position - self._start - self._filled, self._room())
            self._flat[self._filled : self._filled + take].zero_()
            self._filled += take

    def _room(self) -> int:
        if self._filled == self._flat.numel():
            self._flush()
        return self._flat.numel() - self._filled

    def _flush(self) -> None:
        if not self._filled:
            return
        itemsize = self._dtype.itemsize
        self._store.write(
            self._unit.index, self._start * itemsize, self._window.bytes[: self._filled * itemsize]
        ).wait()
        self._start += self._filled
        self._filled = 0


def read_slot(store: Store, unit: Unit, slot: Slot, dtype: torch.dtype) -> torch.Tensor:
    """A copy of one slot in its shape and ``dtype``."""
    if not slot.numel:
        return torch.empty(slot.shape, dtype=dtype)
    pages, first, count = _pages(unit, slot, dtype)
    window = HostMemory(count)
    store.read(unit.index, pages, window.bytes).wait()
    value = window.bytes.view(dtype)[first : first + slot.numel].clone().view(slot.shape)
    window.free()
    return value


def write_slot(store: Store, unit: Unit, slot: Slot, dtype: torch.dtype, value: torch.Tensor) -> None:
    """Replaces one slot's values by what lies in it of ``value``, converted to ``dtype``; neighbours stay."""
    if not slot.numel:
        return
    pages, first, count = _pages(unit, slot, dtype)
    window = HostMemory(count)
    store.read(unit.index, pages, window.bytes).wait()
    window.bytes.view(dtype)[first : first + slot.numel].copy_(value.reshape(-1)[slot.first : slot.first + slot.numel])
    store.write(unit.index, pages, window.bytes).wait()
    window.free()


def _pages(unit: Unit, slot: Slot, dtype: torch.dtype) -> tuple[int, int, int]:
    """First byte of the pages that hold ``slot``, the slot's first element in them, how many bytes they are."""
    start = slot.offset * dtype.itemsize
    page = start // PAGE_BYTES * PAGE_BYTES
    stop = min(round_up(max(slot.stop * dtype.itemsize, page + 1), PAGE_BYTES), unit.layout.nbytes(dtype))
    return page, (start - page) // dtype.itemsize, stop - page
