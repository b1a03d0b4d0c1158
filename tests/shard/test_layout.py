"""Flat layouts: no overlap, whole pages, sub-groups that cover everything once."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.shard.layout import SLOT_ELEMENTS, flat_layout
from infinity.shard.subgroups import subgroups
from infinity.tier import PAGE_BYTES

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=8)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


@given(shapes=SHAPES, dtype=st.sampled_from(DTYPES), world_size=st.integers(1, 9))
def test_slots_tile_the_buffer_with_the_gaps(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, world_size: int
) -> None:
    layout = flat_layout([(f"p{number}", shape) for number, shape in enumerate(shapes)], dtype, world_size)
    owner = torch.zeros(layout.numel, dtype=torch.int32)
    for slot in layout.slots:
        assert slot.numel == math.prod(slot.shape) == slot.stop - slot.offset
        assert slot.offset % SLOT_ELEMENTS == 0
        owner[slot.offset : slot.stop] += 1
    for start, stop in layout.gaps():
        assert start < stop
        owner[start:stop] += 1
    assert bool((owner == 1).all()), "every element belongs to one slot or one gap"
    assert layout.used_numel == sum(math.prod(shape) for shape in shapes)
    assert [slot.name for slot in layout.slots] == [f"p{number}" for number in range(len(shapes))]


@given(shapes=SHAPES, dtype=st.sampled_from(DTYPES), world_size=st.integers(1, 9))
def test_every_shard_is_whole_pages_in_every_dtype(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, world_size: int
) -> None:
    layout = flat_layout([("p", shape) for shape in shapes], dtype, world_size)
    for kept_in in (dtype, torch.float32, torch.bfloat16):
        assert layout.shard_nbytes(kept_in) % PAGE_BYTES == 0
        assert layout.shard_nbytes(kept_in) > 0
        assert layout.nbytes(kept_in) == world_size * layout.shard_nbytes(kept_in)
    end = max((slot.stop for slot in layout.slots), default=0)
    assert end <= layout.numel
    assert layout.numel - end < world_size * (PAGE_BYTES + SLOT_ELEMENTS), "padding is bounded by a page for each rank"


@given(shapes=SHAPES)
def test_views_are_the_slots(shapes: list[tuple[int, ...]]) -> None:
    layout = flat_layout([("p", shape) for shape in shapes], torch.float32)
    flat = torch.arange(layout.numel, dtype=torch.float32)
    for slot, view in zip(layout.slots, layout.views(flat), strict=True):
        assert tuple(view.shape) == slot.shape
        assert view.reshape(-1).tolist() == list(range(slot.offset, slot.stop))
        assert view.data_ptr() == flat.data_ptr() + 4 * slot.offset or slot.numel == 0


@given(pages=st.integers(1, 200), wanted=st.integers(1, 1 << 20))
def test_subgroups_cover_a_shard_once_on_page_boundaries(pages: int, wanted: int) -> None:
    shard = pages * (PAGE_BYTES // 2)
    found = subgroups(shard, wanted)
    assert found[0][0] == 0
    assert found[-1][1] == shard
    assert all(one[1] == other[0] for one, other in pairwise(found))
    for start, stop in found:
        assert 0 < stop - start <= max(wanted, PAGE_BYTES // 2)
        for itemsize in (2, 4):
            assert start * itemsize % PAGE_BYTES == 0
            assert stop * itemsize % PAGE_BYTES == 0


def test_known_numbers() -> None:
    layout = flat_layout([("a", (3, 5)), ("b", ()), ("c", (2048,))], torch.bfloat16)
    assert [(slot.offset, slot.stop) for slot in layout.slots] == [(0, 15), (32, 33), (64, 2112)]
    assert layout.gaps() == [(15, 32), (33, 64), (2112, 4096)]
    assert (layout.numel, layout.nbytes(), layout.nbytes(torch.float32)) == (4096, 8192, 16384)
    assert subgroups(4096, 2048) == [(0, 2048), (2048, 4096)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_empty_unit_is_still_one_page(world_size: int) -> None:
    layout = flat_layout([], torch.float32, world_size)
    assert layout.shard_nbytes(torch.bfloat16) == PAGE_BYTES
    assert layout.gaps() == [(0, layout.numel)]
