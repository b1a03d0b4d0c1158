"""Fills what is left of host memory with states that would be on NVMe."""

from __future__ import annotations

from dataclasses import replace

from infinity.config import Config
from infinity.plan.bill import Plan
from infinity.plan.placement import OPTIMIZER_KINDS, Placement
from infinity.shard.partition import Partition
from infinity.tier import PAGE_BYTES, StateKind, Tier, round_up


def filled(plan: Plan, partition: Partition, config: Config, available: int) -> Placement:
    """The placement of ``plan`` with as many optimizer states in host memory as budget and RAM (``available``) give.

    Only kinds that the config leaves to the plan; unit by unit in forward order, so that the units needed first are
    updated without waiting for a disk. Unit inputs that the plan does not know yet get the room instead.
    """
    placement, budget = plan.placement, plan.budgets[Tier.HOST]
    free = [
        kind for kind in OPTIMIZER_KINDS if placement[kind] is Tier.NVME and config.tier_of(kind) is None
    ]  # fmt: skip
    unknown = plan.waiting is None and config.tier_of(StateKind.ACTIVATION) is not Tier.DEVICE
    if not free or budget is None or unknown:
        return placement
    room = min(budget, available - plan.total(Tier.DEVICE)) - plan.total(Tier.HOST)
    near = set()
    for unit in partition.units:
        for kind in free:
            nbytes = round_up(placement.nbytes(kind, unit), PAGE_BYTES)
            if 0 < nbytes <= room:
                near.add((kind, unit.index))
                room -= nbytes
    return replace(placement, near=frozenset(near))
