"""Streams saved values onto the tiers of a model, however that is cut or placed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from infinity.device.lane import DONE, Ticket
from infinity.errors import CheckpointError
from infinity.memory.host import HostMemory
from infinity.plan.placement import Placement
from infinity.shard.partition import Unit
from infinity.storage.store import Store
from infinity.tier import PAGE_BYTES, StateKind, round_up

WINDOW_NUMEL = 1 << 20

Reader = Callable[[int, torch.Tensor], None]
"""Copies a parameter's flattened elements from a position on into a 1-D tensor of any floating dtype."""


@dataclass
class Difference:
    """How a model and what was saved do not match, one list of names per way."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)

    def check(self, path: str, *, strict: bool) -> None:
        """Raises for everything at once; not strict, for wrong shapes alone."""
        told = [f"{len(self.misshaped)} have another shape: {', '.join(self.misshaped)}"] if self.misshaped else []
        if strict and self.missing:
            told.append(f"{len(self.missing)} are missing: {', '.join(self.missing)}")
        if strict and self.unexpected:
            told.append(f"{len(self.unexpected)} are not in the model: {', '.join(self.unexpected)}")
        if told:
            raise CheckpointError(f"{path} does not match the model: {'; '.join(told)}")


def compare(
    shapes: Mapping[str, Sequence[int]],
    names: Mapping[str, Sequence[str]],
    saved: Mapping[str, Sequence[int]],
    owner: Mapping[str, str],
) -> tuple[dict[str, str], Difference]:
    """Which saved name serves each name of the model, with everything that does not fit.

    ``names`` are all the names of each of the model's values (tied weights have several), of which any one will do;
    ``saved`` are all the saved names, ``owner`` leads from each of those that mean the same value to one of them.
    """
    found: dict[str, str] = {}
    used: set[str] = set()
    difference = Difference()
    for own, shape in shapes.items():
        known = [name for name in names[own] if name in saved]
        used.update(owner.get(name, name) for name in known)
        if not known:
            difference.missing.append(own)
        elif tuple(saved[known[0]]) != tuple(shape):
            difference.misshaped.append(f"{own} (saved {list(saved[known[0]])}, in the model {list(shape)})")
        else:
            found[own] = known[0]
    difference.unexpected = [name for name in saved if owner.get(name, name) == name and name not in used]
    return found, difference


class StateWriter:
    """Fills a unit's states on their tiers, window by window, keeping the elements that nobody gives."""

    def __init__(self, placement: Placement, stores: dict[StateKind, Store]) -> None:
        self._placement, self._stores = placement, stores
        self._windows: dict[int, deque[_Window]] = {}

    def fill(self, unit: Unit, kinds: Sequence[StateKind], readers: Mapping[int, Reader]) -> None:
        """Gives every kind the same values: those of each slot from its reader, by slot number.

        ``unit`` may be one rank's slice of a unit: what its readers are asked for is counted in whole parameters. The
        first kind is the most precise one; the others are it, rounded.
        """
        slots = unit.layout.slots
        complete = all(number in readers or not slot.numel for number, slot in enumerate(slots))
        for start, stop in _windows(unit.layout.numel):
            inside = [number for number in readers if slots[number].offset < stop and start < slots[number].stop]
            if not inside:
                continue
            ranges = [(max(slots[number].offset, start), min(slots[number].stop, stop)) for number in inside]
            gaps = sum(high - low for low, high in ranges) < stop - start
            first: torch.Tensor | None = None
            for turn, kind in enumerate(kinds):
                with _Piece(self, unit, kind, start, stop, turn, keep=not complete, gaps=gaps) as flat:
                    for number, (low, high) in zip(inside, ranges, strict=True):
                        target = flat[low - start : high - start]
                        if first is None:
                            readers[number](slots[number].first + low - slots[number].offset, target)
                        else:
                            copied(target, first[low - start : high - start])
                    first = flat if first is None else first

    def finish(self) -> None:
        """Waits until everything has reached its store; raises what kept it from there."""
        for window in self._all():
            window.written.wait()

    def free(self) -> None:
        for window in self._all():
            with suppress(Exception):  # who wants to know calls ``finish``
                window.written.wait()
            window.memory.free()
        self._windows.clear()

    def window(self, turn: int, nbytes: int) -> _Window:
        """Memory for one kind's window, while the one before is written."""
        windows = self._windows.setdefault(turn, deque(_Window(HostMemory(0)) for _ in range(2)))
        windows.rotate()
        window = windows[0]
        window.written.wait()
        if window.memory.nbytes < nbytes:
            window.memory.free()
            window.memory = HostMemory(nbytes)
        return window

    def _all(self) -> list[_Window]:
        return [window for windows in self._windows.values() for window in windows]


@dataclass
class _Window:
    memory: HostMemory
    written: Ticket = DONE


class StateReader:
    """Reads single values from their tiers, piece by piece."""

    def __init__(self, placement: Placement, stores: dict[StateKind, Store]) -> None:
        self._placement, self._stores = placement, stores
        self._memory = HostMemory(0)

    def reader(self, unit: Unit, slot: int, kind: StateKind) -> Reader:
        """Reads one slot's values of ``kind``."""
        store, dtype = self._stores[kind], self._placement.dtype(kind, unit)
        offset = unit.layout.slots[slot].offset

        def read(start: int, into: torch.Tensor) -> None:
            first, last = (offset + start) * dtype.itemsize, (offset + start + into.numel()) * dtype.itemsize
            home = store.resident(unit.index)
            if home is not None:
                copied(into, home[first:last].view(dtype))
                return
            page = first // PAGE_BYTES * PAGE_BYTES
            pages = self._window(round_up(last, PAGE_BYTES) - page)
            store.read(unit.index, page, pages).wait()
            copied(into, pages[first - page : last - page].view(dtype))

        return read

    def free(self) -> None:
        self._memory.free()

    def _window(self, nbytes: int) -> torch.Tensor:
        if self._memory.nbytes < nbytes:
            self._memory.free()
            self._memory = HostMemory(nbytes)
        return self._memory.bytes[:nbytes]


class _Piece:
    """Elements of a unit's state that are being changed: in place, or in memory that is written on leaving."""

    def __init__(
        self,
        writer: StateWriter,
        unit: Unit,
        kind: StateKind,
        start: int,
        stop: int,
        turn: int,
        *,
        keep: bool,
        gaps: bool,
    ) -> None:
        self._store = writer._stores[kind]
        self._unit = unit.index
        dtype = writer._placement.dtype(kind, unit)
        self._start = start * dtype.itemsize
        stop *= dtype.itemsize
        home = self._store.resident(unit.index)
        self._window: _Window | None = None
        if home is not None:
            self._bytes = home[self._start : stop]
        else:
            self._window = writer.window(turn, stop - self._start)
            self._bytes = self._window.memory.bytes[: stop - self._start]
            if keep:
                self._store.read(unit.index, self._start, self._bytes).wait()
            elif gaps:
                self._bytes.zero_()
        self._flat = self._bytes.view(dtype)

    def __enter__(self) -> torch.Tensor:
        return self._flat

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and self._window is not None:
            self._window.written = self._store.write(self._unit, self._start, self._bytes)


def _windows(numel: int) -> Iterator[tuple[int, int]]:
    for start in range(0, numel, WINDOW_NUMEL):
        yield start, min(start + WINDOW_NUMEL, numel)


def reader_of(value: torch.Tensor) -> Reader:
    """Reads from a tensor in memory."""
    flat = value.detach().reshape(-1)

    def read(start: int, into: torch.Tensor) -> None:
        copied(into, flat[start : start + into.numel()])

    return read


def zeros(start: int, into: torch.Tensor) -> None:
    """Reads zeros."""
    into.zero_()


def copied(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copies 1-D values; those of one dtype on this thread alone, as a team of threads is dear for a few megabytes."""
    if into.dtype == source.dtype and into.stride() == source.stride() == (1,) and source.is_cpu:
        into.view(torch.uint8).numpy()[:] = source.view(torch.uint8).numpy()
    else:
        into.copy_(source)
