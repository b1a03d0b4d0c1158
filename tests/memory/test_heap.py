"""Pieces never overlap, neighbours merge, the peak is the highest byte that was in use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity.memory.heap import Heap
from infinity.tier import PAGE_BYTES, round_up


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5 * PAGE_BYTES)), max_size=60))
def test_pieces_never_overlap_and_stay_below_the_limit(steps: list[tuple[bool, int]]) -> None:
    heap = Heap(16 * PAGE_BYTES)
    held: dict[int, int] = {}
    highest = 0
    for take, number in steps:
        if not take:
            if held:
                start = sorted(held)[number % len(held)]
                heap.give(start)
                del held[start]
            continue
        start = heap.take(number)
        size = round_up(max(number, 1), PAGE_BYTES)
        gaps, end = [], 0
        for other in sorted(held):
            gaps.append(other - end)
            end = other + held[other]
        gaps.append(heap.limit - end)
        assert (start is None) == (size > max(gaps))
        if start is not None:
            assert start % PAGE_BYTES == 0
            assert all(start + size <= other or other + held[other] <= start for other in held)
            held[start] = size
            highest = max(highest, start + size)
        assert heap.in_use == sum(held.values())
    assert heap.peak == highest


def test_what_comes_back_in_reverse_leaves_no_hole() -> None:
    heap = Heap(1 << 30)
    for _ in range(3):
        starts = [heap.take(size) for size in (5000, 100, 70_000, 4096)]
        for start in reversed(starts):
            assert start is not None
            heap.give(start)
    assert heap.peak == sum(round_up(size, PAGE_BYTES) for size in (5000, 100, 70_000, 4096))
