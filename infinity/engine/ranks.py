"""What an engine on several ranks is built with that one alone does not need."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from infinity.comm import Group
from infinity.config import Config
from infinity.engine.homes import Homes
from infinity.errors import ConfigError
from infinity.optim.ranked import PublishingUpdater, ReplicatedUpdater, SlicedUpdater
from infinity.optim.updater import Updater
from infinity.plan import Plan
from infinity.shard.partition import Partition
from infinity.tier import StateKind, Tier


def share_of_threads(group: Group) -> int:
    """Threads of the update: this rank's part of the cores, as far as PyTorch has not been given fewer."""
    if group.world_size == 1:
        return 0
    return min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // group.local_world_size))


def share_of_cores(cores: Collection[int], local_rank: int, local_ranks: int) -> set[int]:
    """The cores of one of the ranks of a machine: a block of neighbours, or all where that is fewer than two.

    >>> share_of_cores(range(8), 1, 3)
    {2, 3}
    """
    each = len(cores) // local_ranks
    return set(cores) if each < 2 else set(sorted(cores)[local_rank * each : (local_rank + 1) * each])


@contextmanager
def on_own_cores(group: Group) -> Iterator[None]:
    """Inside, threads that are started run on this rank's cores; not if a launcher has chosen some already."""
    before = os.sched_getaffinity(0)
    if group.world_size == 1 or len(before) < (os.cpu_count() or 1):
        yield
        return
    os.sched_setaffinity(0, share_of_cores(before, group.local_rank, group.local_world_size))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def check_alike(group: Group, model: nn.Module, config: Config, found: Partition, plan: Plan, *, moments: bool) -> None:
    """Raises on every rank if one has another model or config than rank 0."""
    shapes = [(unit.name, str(unit.layout), unit.trainable) for unit in found.units]
    kinds = {kind.value: tier.value for kind, tier in plan.placement.tiers.items()}
    stage = config.zero_optimization.stage
    facts = {
        "zero_optimization.stage": stage,
        "units": shapes,
        "buffers": [(name, tuple(buffer.shape), str(buffer.dtype)) for name, buffer in model.named_buffers()],
        "placement": kinds,
        "batch sizes": str(config.resolve_batch(group.world_size)),
        "slabs": (plan.param_slabs, plan.collection_slabs, config.infinity.prefetch_units),
    }
    told = json.dumps(facts, default=str).encode()
    for rank, other in enumerate(group.talk("the comparison of model and config", told)):
        theirs = json.loads(other)
        odd = [name for name, fact in json.loads(told).items() if theirs[name] != fact]
        if odd:
            raise ConfigError(
                f"rank {rank} has other {' and '.join(odd)} than rank {group.rank}; give all one model, one config"
            )
    if group.world_size > 1 and stage and not moments:
        raise ConfigError(
            "optimizer: torch's optimizers need whole parameters, so with several ranks they run at "
            "zero_optimization.stage 0 only; use Adam or AdamW, or stage 0"
        )


def numbers_of_step(optimizer: torch.optim.Optimizer, facts: Mapping[str, object]) -> bytes:
    """What an update depends on beside gradients, for the comparison among ranks: JSON, an object."""
    numbers = {
        f"param_groups[{number}].{name}": value
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }

    def plain(value: object) -> object:
        return value.tolist() if isinstance(value, torch.Tensor) else str(value)

    return json.dumps({**numbers, **facts}, default=plain).encode()


def shared_units(partition: Partition) -> set[int]:
    """Units that several entries lend, such as an embedding that is the head's weight too."""
    users = Counter(index for entry in partition.entries for index in entry.units)
    return {index for index, count in users.items() if count > 1}


def ranked_updater(homes: Homes, *rest: Any) -> Updater:
    """The updater for the stage: of whole units, of slices that go to all ranks, of slices that stay."""
    if StateKind.MASTER in homes.placement.whole:
        return ReplicatedUpdater(homes.group, _whole(homes, StateKind.GRAD), *rest)
    if StateKind.PARAM in homes.placement.whole:
        return PublishingUpdater(homes.group, _whole(homes, StateKind.PARAM), *rest)
    return SlicedUpdater(*rest)


def whole_sums(homes: Homes) -> dict[int, torch.Tensor]:
    """The fp32 accumulators of whole units, where this rank has them in memory."""
    if StateKind.GRAD not in homes.placement.whole or homes.placement[StateKind.GRAD] is Tier.NVME:
        return {}
    return {index: region.view(torch.float32) for index, region in _whole(homes, StateKind.GRAD).items()}


def _whole(homes: Homes, kind: StateKind) -> dict[int, torch.Tensor]:
    """The memory of every trained unit's state of a kind that each rank has all of."""
    regions = {unit.index: homes.stores[kind].resident(unit.index) for unit in homes.units if unit.trainable}
    return {index: region for index, region in regions.items() if region is not None}
