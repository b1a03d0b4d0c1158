"""The slices of all ranks are the unit."""

from __future__ import annotations

import pytest
import torch

from infinity.shard.layout import flat_layout
from infinity.shard.ownership import shard_of, shard_range
from infinity.shard.partition import Unit
from infinity.tier import PAGE_BYTES

SHAPES = [("a", (3, 700)), ("b", (5,)), ("c", ()), ("d", (0,)), ("e", (4097,)), ("f", (2, 2, 2)), ("g", (9000,))]


def unit(world_size: int, dtype: torch.dtype = torch.bfloat16) -> Unit:
    layout = flat_layout(SHAPES, dtype, world_size)
    return Unit(0, "unit", layout, True, tuple((("", name),) for name, _ in SHAPES))


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_element_of_every_parameter_is_in_one_slice(world_size: int, dtype: torch.dtype) -> None:
    whole = unit(world_size, dtype)
    flat = torch.arange(whole.layout.numel, dtype=torch.float64)
    for number, slot in enumerate(whole.layout.slots):
        pieces = []
        for rank in range(world_size):
            own = shard_of(whole, rank)
            start, stop = shard_range(whole.layout, rank)
            mine = own.layout.slots[number]
            assert mine.name == slot.name
            if mine.numel:
                assert mine.first == sum(len(piece) for piece in pieces)
            pieces.append(flat[start:stop][mine.offset : mine.stop])
        assert torch.equal(torch.cat(pieces), flat[slot.offset : slot.stop])


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_slices_are_whole_pages_side_by_side(world_size: int) -> None:
    whole = unit(world_size)
    ranges = [shard_range(whole.layout, rank) for rank in range(world_size)]
    assert [stop for _, stop in ranges[:-1]] == [start for start, _ in ranges[1:]]
    assert ranges[-1][1] == whole.layout.numel
    assert all((stop - start) * 2 % PAGE_BYTES == 0 for start, stop in ranges)
    assert {shard_of(whole, rank).layout.numel for rank in range(world_size)} == {whole.layout.shard_numel}


def test_gaps_of_a_slice_are_what_no_parameter_covers() -> None:
    whole = unit(3)
    for rank in range(3):
        layout = shard_of(whole, rank).layout
        covered = torch.zeros(layout.numel, dtype=torch.int)
        for slot in layout.slots:
            covered[slot.offset : slot.stop] += 1
        for start, stop in layout.gaps():
            covered[start:stop] += 1
        assert covered.eq(1).all()


def test_alone_a_rank_owns_the_unit_itself() -> None:
    whole = unit(1)
    assert shard_of(whole, 0) is whole
