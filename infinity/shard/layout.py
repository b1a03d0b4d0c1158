"""Where each parameter of a unit lies in the unit's flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.tier import PAGE_BYTES, round_up

SLOT_ELEMENTS = 32
"""Slots start at multiples of this: one cache line in 16 bit, so every view suits the matmul kernels."""


@dataclass(frozen=True)
class Slot:
    """One parameter inside a flat buffer, or the part of it that lies in a shard: what begins at its element ``first``.

    Offsets are in elements, equal for every state kind.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    first: int = 0

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """Slots of one dtype in memory order, padded so that each of ``world_size`` shards is whole pages.

    A shard is a whole number of 4 KiB pages in the compute dtype and in fp32, so every kind of state of a shard can
    be moved by direct I/O straight between a file and its final place.
    """

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    shard_numel: int
    world_size: int = 1

    @property
    def numel(self) -> int:
        """Elements of the whole flat buffer, padding included."""
        return self.shard_numel * self.world_size

    @property
    def used_numel(self) -> int:
        """Elements that are really parameters."""
        return sum(slot.numel for slot in self.slots)

    def nbytes(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of the whole flat buffer in ``dtype`` (the layout's own by default)."""
        return self.numel * (dtype or self.dtype).itemsize

    def shard_nbytes(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of one rank's slice in ``dtype`` (the layout's own by default)."""
        return self.shard_numel * (dtype or self.dtype).itemsize

    def gaps(self) -> list[tuple[int, int]]:
        """Element ranges that belong to no parameter; they hold zeros in every state kind."""
        gaps, end = [], 0
        for slot in self.slots:
            if slot.offset > end:
                gaps.append((end, slot.offset))
            end = slot.stop
        if end < self.numel:
            gaps.append((end, self.numel))
        return gaps

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter as a view of ``flat`` (1-D, at least ``numel`` elements)."""
        return [flat[slot.offset : slot.stop].view(slot.shape) for slot in self.slots]


def flat_layout(
    parameters: Sequence[tuple[str, tuple[int, ...]]], dtype: torch.dtype, world_size: int = 1
) -> FlatLayout:
    """Lays ``(name, shape)`` pairs out one behind the other."""
    slots, end = [], 0
    for name, shape in parameters:
        numel = 1
        for size in shape:
            numel *= size
        slots.append(Slot(name, tuple(shape), end, numel))
        end = round_up(end + numel, SLOT_ELEMENTS)
    page_elements = PAGE_BYTES // min(dtype.itemsize, 2)
    shard = round_up(-(-max(end, 1) // world_size), page_elements)
    return FlatLayout(dtype, tuple(slots), shard, world_size)
