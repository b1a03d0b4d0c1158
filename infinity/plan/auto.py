"""Fills what is left of faster tiers with states that would be on slower ones, unit by unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from infinity.config import Config
from infinity.plan.placement import OPTIMIZER_KINDS, Placement, choices
from infinity.shard.partition import Partition, Unit
from infinity.tier import PAGE_BYTES, StateKind, Tier, round_up


def filled(placement: Placement, partition: Partition, config: Config, room: dict[Tier, int]) -> Placement:
    """``placement`` with as many states on the device, then on the host, as there is ``room`` for, in bytes by tier.

    Only kinds that the config leaves to the plan, of which every rank keeps its own slice. Parameters come first, as
    they move twice in a step, then gradients, for which backward waits; then optimizer states, unit by unit in forward
    order, so that the units needed first are updated without waiting for a slower tier.
    """
    allowed, apart, left = choices(config), dict(placement.apart), dict(room)
    for tier in (Tier.DEVICE, Tier.HOST):
        for kind, unit in _by_worth(partition):
            now = apart.get((kind, unit.index), placement[kind])
            faster = allowed[kind][: allowed[kind].index(placement[kind])]
            nbytes = round_up(placement.nbytes(kind, unit), PAGE_BYTES)
            if kind in placement.whole or tier not in faster or _RANK[tier] >= _RANK[now]:
                continue
            if 0 < nbytes <= left[tier]:
                apart[kind, unit.index] = tier
                left[tier] -= nbytes
    return _plainest(replace(placement, apart=apart), partition)


_RANK = {tier: number for number, tier in enumerate(Tier)}


def _by_worth(partition: Partition) -> Iterator[tuple[StateKind, Unit]]:
    for kind in (StateKind.PARAM, StateKind.GRAD):
        for unit in partition.units:
            yield kind, unit
    for unit in partition.units:
        for kind in OPTIMIZER_KINDS:
            yield kind, unit


def _plainest(placement: Placement, partition: Partition) -> Placement:
    """The same with each kind on the slowest tier that one of its units is on."""
    tiers, apart = dict(placement.tiers), {}
    for kind in tiers:
        having = [unit for unit in partition.units if placement.has(kind, unit)]
        tiers[kind] = max((placement.tier(kind, unit) for unit in having), key=_RANK.__getitem__, default=tiers[kind])
        for unit in having:
            if placement.tier(kind, unit) is not tiers[kind]:
                apart[kind, unit.index] = placement.tier(kind, unit)
    return replace(placement, tiers=tiers, apart=apart)
