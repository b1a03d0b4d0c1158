"""Arenas hand out exactly what was planned; slabs come back only when nothing touches them."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.device.lane import LaneTicket
from infinity.errors import CapacityError
from infinity.memory.arena import Arena, SlabPool
from infinity.memory.host import HostMemory
from infinity.tier import HUGE_PAGE_BYTES, PAGE_BYTES, Tier, round_up


def arena(nbytes: int) -> Arena:
    return Arena(Tier.HOST, HostMemory(nbytes).bytes)


@pytest.mark.parametrize("nbytes", [0, 1, PAGE_BYTES, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 5])
def test_host_memory_is_exact_aligned_and_zero(nbytes: int) -> None:
    memory = HostMemory(nbytes)
    assert memory.bytes.numel() == memory.nbytes == nbytes
    assert memory.bytes.data_ptr() % HUGE_PAGE_BYTES == 0 or nbytes == 0
    assert not memory.bytes.any()
    memory.bytes.fill_(1)
    memory.free()
    assert memory.bytes.numel() == 0


@given(sizes=st.lists(st.integers(1, 3 * PAGE_BYTES), max_size=12))
def test_regions_are_page_aligned_apart_and_counted(sizes: list[int]) -> None:
    total = sum(round_up(size, PAGE_BYTES) for size in sizes)
    made = arena(total)
    regions = [made.carve(size, "test") for size in sizes]
    for number, region in enumerate(regions, start=1):
        region.fill_(number)
        assert made.contains(region)
        assert region.data_ptr() % PAGE_BYTES == 0
    for number, (size, region) in enumerate(zip(sizes, regions, strict=True), start=1):
        assert region.numel() == size
        assert bool((region == number).all())
    assert made.carved == total
    assert made.allocations == len(sizes)
    with pytest.raises(CapacityError, match=f"one more needs {PAGE_BYTES} bytes of host memory .* left 0 of {total}"):
        made.carve(1, "one more")
    assert not made.contains(torch.zeros(4))


def test_a_write_to_one_region_does_not_disturb_autograd_of_another() -> None:
    made = arena(2 * PAGE_BYTES)
    one, other = (made.carve(PAGE_BYTES, "test") for _ in range(2))
    weight = one.view(torch.float32).fill_(2.0).requires_grad_()
    loss = (weight * weight).sum()
    other.fill_(1)
    loss.backward()
    assert weight.grad is not None
    assert bool((weight.grad == 4).all())


def test_slabs_are_lent_first_in_first_out_and_peak_counts_them() -> None:
    made = arena(3 * PAGE_BYTES)
    pool = SlabPool(made, 3, PAGE_BYTES, "test")
    assert (made.in_use, made.peak, made.allocations) == (0, 0, 3)
    first, second = pool.take(), pool.take()
    assert (made.in_use, made.peak) == (2 * PAGE_BYTES, 2 * PAGE_BYTES)
    pool.put(first)
    third = pool.take()
    assert third not in (first, second)
    assert pool.take() is first
    assert pool.try_take() is None
    for slab in (first, second, third):
        pool.put(slab)
    assert (made.in_use, made.peak) == (0, 3 * PAGE_BYTES)


def test_a_slab_on_its_way_out_is_in_use_until_it_is_taken_again() -> None:
    made = arena(PAGE_BYTES)
    pool = SlabPool(made, 1, PAGE_BYTES, "test", poison=True)
    slab = pool.take()
    slab.memory.fill_(1)
    writing = LaneTicket()
    pool.put(slab, writing)
    assert made.in_use == PAGE_BYTES
    assert bool((slab.memory == 1).all()), "not poisoned while it is being written"
    writing.resolve()
    assert pool.take() is slab
    assert bool((slab.memory == 0xFF).all())
    assert bool(slab.memory.view(torch.float32).isnan().all())
    assert bool(slab.memory.view(torch.bfloat16).isnan().all())
    assert made.in_use == PAGE_BYTES


def test_a_taker_waits_for_the_last_entry_that_touches_the_slab() -> None:
    pool = SlabPool(arena(PAGE_BYTES), 1, PAGE_BYTES, "test")
    writing = LaneTicket()
    order: list[str] = []
    slab = pool.take()
    pool.put(slab, writing)
    taker = threading.Thread(target=lambda: (pool.take(), order.append("taken")))
    taker.start()
    order.append("written")
    writing.resolve()
    taker.join()
    assert order == ["written", "taken"]


def test_take_waits_for_a_slab_from_another_thread() -> None:
    pool = SlabPool(arena(PAGE_BYTES), 1, PAGE_BYTES, "test")
    slab = pool.take()
    taken: list[object] = []
    taker = threading.Thread(target=lambda: taken.append(pool.take()))
    taker.start()
    pool.put(slab)
    taker.join()
    assert taken == [slab]


def test_a_failed_write_is_told_to_the_next_taker_once_and_the_slab_survives() -> None:
    made = arena(PAGE_BYTES)
    pool = SlabPool(made, 1, PAGE_BYTES, "test")
    writing = LaneTicket()
    pool.put(pool.take(), writing)
    writing.fail(OSError("disk on fire"))
    with pytest.raises(OSError, match="disk on fire"):
        pool.take()
    assert made.in_use == 0
    assert pool.take() is not None
    assert made.in_use == made.peak == PAGE_BYTES
