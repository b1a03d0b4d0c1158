"""Chooses the units together with their plan, cutting large matrices where it would not fit otherwise."""

from __future__ import annotations

import torch
from torch import nn

from infinity.config import Config
from infinity.errors import CapacityError
from infinity.plan.bill import Plan
from infinity.plan.memory import READ_AHEAD, plan_memory
from infinity.plan.waiting import Waits
from infinity.shard.partition import Partition, partition
from infinity.tier import PAGE_BYTES

MIN_AUTO_TILE_BYTES = 16 << 10
"""Below this, a tile costs more to ask for than to read."""

MAX_AUTO_TILES = 1024
"""Of one matrix. With more the plan takes minutes, every pass over the matrix a thousand requests."""


def plan_units(
    model: nn.Module,
    config: Config,
    dtype: torch.dtype | None,
    *,
    world_size: int = 1,
    read_ahead: int = READ_AHEAD,
    moments: bool = True,
    local_ranks: int = 1,
    waits: Waits | None = None,
) -> tuple[Partition, Plan]:
    """The units of ``model``, which may be on the meta device, with the plan for them.

    ``infinity.tile_bytes`` "auto" cuts nothing while the plan fits. Where it does not, and ``device_memory`` is
    given, tiles are the largest of which two fit beside everything else (one is computed with while the other is
    read), or one if two never do. Raises ``CapacityError``, about the uncut model, if no tiles fit either,
    of which a matrix may have ``MAX_AUTO_TILES``.
    """
    units, wanted = config.infinity.units, config.infinity.tile_bytes

    def attempt(tile_bytes: int | None) -> tuple[Partition, Plan]:
        found = partition(model, units if isinstance(units, str) else list(units), dtype, world_size, tile_bytes)
        return found, plan_memory(
            found,
            config,
            read_ahead=read_ahead,
            moments=moments,
            local_ranks=local_ranks,
            waits=waits,
        )

    if wanted != "auto":
        return attempt(int(wanted))
    try:
        return attempt(None)
    except CapacityError as error:
        refusal = error
    budget = config.infinity.device_memory
    tile_bytes = 0 if budget == "auto" or not moments else int(budget) // 2 // PAGE_BYTES * PAGE_BYTES
    single: tuple[Partition, Plan] | None = None
    largest = max((p.numel() * (dtype or p.dtype).itemsize for p in model.parameters()), default=0)
    while tile_bytes >= max(MIN_AUTO_TILE_BYTES, largest // MAX_AUTO_TILES):
        try:
            found, plan = attempt(tile_bytes)
        except CapacityError:
            pass
        else:
            if _two_of_each(found, plan):
                return found, plan
            single = single or (found, plan)
        tile_bytes = tile_bytes * 3 // 4 // PAGE_BYTES * PAGE_BYTES
    if single is not None:
        return single
    raise refusal


def _two_of_each(found: Partition, plan: Plan) -> bool:
    """Whether a tile can be read while another one is computed with."""
    cut = {piece.unit for matrix in found.tiled for piece in matrix.pieces}
    tiles = {unit.layout.nbytes() for unit in plan.placement.fetched(found) if unit.index in cut}
    return all(plan.param_slabs.get(min(size for size in plan.param_slabs if size >= tile), 2) > 1 for tile in tiles)
