"""What one micro-batch takes of memory beside the states of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from infinity.tier import PAGE_BYTES, Tier

WINDOW_CALLS = 4
"""Unit calls whose inputs are in host memory at once while the rest is on NVMe: in use, read ahead, written behind."""


@dataclass(frozen=True)
class UnitInput:
    """A tensor that ``unit`` is the first to keep, ``last`` the last; ``nbytes`` in whole pages.

    It leaves the device if it ``moves``. One that some units move, others leave where it is, counts as two.
    """

    unit: str
    nbytes: int
    last: str
    moves: bool = True


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch in bytes. ``inputs``: each tensor that recomputed units keep, once, in order of use.

    ``largest_call`` is the most that one call is given of what moves, ``outside`` the peak of what torch allocates by
    itself: kept activations, temporaries, gradients on their way; without weights, without inputs that move away.
    ``logits`` is the largest output of a linear layer outside every block; ``order`` are the blocks as forward came to
    them.
    """

    inputs: tuple[UnitInput, ...]
    largest_call: int
    outside: int
    logits: int
    tokens: int
    order: tuple[str, ...] = ()

    def away(self, tier: Tier, together: int, window: int | None = None) -> tuple[int, int]:
        """Bytes on host, on NVMe for ``together`` micro-batches at once whose inputs wait on ``tier``.

        Those on NVMe pass through ``window`` bytes of host memory, by default ``WINDOW_CALLS`` calls' worth.
        """
        moved = [one for one in self.inputs if one.moves]
        units = list(dict.fromkeys([*(one.unit for one in moved), *(one.last for one in moved)]))
        # Micro-batches that are in flight together go through a unit one after the other, forward and backward.
        kept = [(one, turn) for unit in units for turn in range(together) for one in moved if one.unit == unit]
        if tier is Tier.DEVICE or not kept:
            return 0, 0
        if tier is Tier.HOST:
            return sum(one.nbytes for one, _ in kept), 0
        window = WINDOW_CALLS * self.largest_call if window is None else window
        sizes = [one.nbytes for one, _ in kept]
        # A shared input is needed as soon as its last unit, which is known from the second step on.
        uses = sorted(
            range(len(kept)),
            key=lambda n: (-units.index(kept[n][0].last), kept[n][1], kept[n][0].unit != kept[n][0].last, n),
        )
        recorded = {number: place for place, number in enumerate(uses)}
        reverse = {number: -number for number in range(len(kept))}
        return window, max(swapped(sizes, need, window) for need in (reverse, recorded))


def swapped(sizes: Sequence[int], need: Mapping[int, int], window: int) -> int:
    """Bytes of inputs that go to NVMe: what is needed first stays, up to half of the window, whenever one is kept."""
    written = 0
    staying: list[int] = []
    for number in range(len(sizes)):
        staying = sorted([*staying, number], key=need.__getitem__)
        held, total = [], 0
        for one in staying:
            total += sizes[one]
            if 2 * total > window:
                written += sizes[one]
            else:
                held.append(one)
        staying = held
    return written


def may_move(tensor: torch.Tensor) -> bool:
    """Whether a copy of the bytes is the tensor again: plain, dense, no smaller than a page."""
    return (
        tensor.layout is torch.strided
        and tensor.nbytes >= PAGE_BYTES
        and not tensor.is_inference()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and _is_dense(tensor)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
