"""Which tier each kind of state is on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product

import torch

from infinity.config import Config
from infinity.shard.partition import Partition, Unit
from infinity.tier import StateKind, Tier

OPTIMIZER_KINDS = (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
STREAMED_KINDS = (StateKind.PARAM, StateKind.GRAD, *OPTIMIZER_KINDS)


@dataclass(frozen=True)
class Placement:
    """Tier per state kind, with the dtype rules that decide whether a unit has that state at all.

    An fp32 unit has no separate master: its parameters are the master. A frozen unit has parameters only. Without
    ``moments`` a torch optimizer keeps what it remembers by itself. With ``in_backward`` each gradient is consumed by
    its unit's update in backward, so that none is kept. Of the kinds in ``whole`` every rank keeps all elements, of the
    others its slice.
    """

    tiers: dict[StateKind, Tier]
    device_is_host: bool
    moments: bool = True
    in_backward: bool = False
    whole: frozenset[StateKind] = frozenset()
    ranks: int = 1
    apart: Mapping[tuple[StateKind, int], Tier] = field(default_factory=dict)
    """Where kinds of single units, by index, are that are on a faster tier than their kind, which has two or three."""

    def __getitem__(self, kind: StateKind) -> Tier:
        return self.tiers[kind]

    def tier(self, kind: StateKind, unit: Unit) -> Tier:
        """Where ``unit`` keeps state of ``kind``."""
        return self.apart.get((kind, unit.index), self.tiers[kind])

    def has(self, kind: StateKind, unit: Unit) -> bool:
        """Whether ``unit`` keeps state of ``kind``."""
        if kind is StateKind.PARAM:
            return True
        if not unit.trainable:
            return False
        if kind is StateKind.GRAD:
            return not self.in_backward
        if kind in (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
            return self.moments
        return kind is not StateKind.MASTER or unit.layout.dtype != torch.float32

    def dtype(self, kind: StateKind, unit: Unit) -> torch.dtype:
        """The dtype in which ``unit`` keeps state of ``kind``."""
        return unit.layout.dtype if kind is StateKind.PARAM else torch.float32

    def nbytes(self, kind: StateKind, unit: Unit) -> int:
        """Bytes of ``kind`` that this rank keeps for ``unit``, zero if it has none."""
        if not self.has(kind, unit):
            return 0
        dtype = self.dtype(kind, unit)
        return unit.layout.nbytes(dtype) if kind in self.whole else unit.layout.shard_nbytes(dtype)

    def updated_numel(self, unit: Unit) -> int:
        """Elements of ``unit`` that this rank updates."""
        return unit.layout.numel if StateKind.MASTER in self.whole else unit.layout.shard_numel

    @property
    def gathers(self) -> bool:
        """Whether a unit's parameters come together from all ranks before each use."""
        return self.ranks > 1 and StateKind.PARAM not in self.whole

    def total(self, kind: StateKind, partition: Partition, tier: Tier | None = None) -> int:
        """Bytes of ``kind`` over all units, or those on ``tier``."""
        return sum(self.nbytes(kind, unit) for unit in partition.units if tier in (None, self.tier(kind, unit)))

    def lends_in_place(self, unit: Unit) -> bool:
        """Whether the unit's parameters are used where they are kept, so that nothing is fetched."""
        tier = self.tier(StateKind.PARAM, unit)
        return not self.gathers and (tier is Tier.DEVICE or (tier is Tier.HOST and self.device_is_host))

    def fetched(self, partition: Partition) -> list[Unit]:
        """The units whose parameters pass through slabs."""
        return [unit for unit in partition.units if not self.lends_in_place(unit)]

    def summed_in_slabs(self, partition: Partition) -> list[Unit]:
        """The units whose gradients are summed in slabs, not where they are kept."""
        trained = [unit for unit in partition.units if unit.trainable]
        return [
            unit for unit in trained if self.in_backward or self.tier(StateKind.GRAD, unit) is Tier.NVME
        ]  # fmt: skip


SHARDED_FROM = {StateKind.PARAM: 3, StateKind.GRAD: 2, **dict.fromkeys(OPTIMIZER_KINDS, 1)}
"""The stage of ``zero_optimization`` from which on a rank keeps only its slice of a kind."""


def choices(config: Config) -> dict[StateKind, list[Tier]]:
    """The tiers that the config leaves to each kind, fastest first."""
    found: dict[StateKind, list[Tier]] = {}
    for kind in STREAMED_KINDS:
        tier = config.tier_of(kind)
        usable = [other for other in Tier if other is not Tier.NVME or config.swap_directories(kind)]
        found[kind] = usable if tier is None else [tier]
    explicit = config.infinity.placement
    if explicit == "auto" or StateKind.GRAD not in explicit:
        # Gradients follow the optimizer; behind an optimizer on NVMe they stay in host memory while they fit.
        follow = found[StateKind.EXP_AVG]
        found[StateKind.GRAD] = [Tier.HOST, Tier.NVME] if follow == [Tier.NVME] else follow
    return found


def candidates(config: Config, *, device_is_host: bool, moments: bool = True, ranks: int = 1) -> list[Placement]:
    """The placements the config allows, most preferred first; more than one where it leaves a kind to the plan.

    Moments leave the faster tiers first, parameters last: they are used twice in a step.
    """
    allowed = choices(config)
    stage = config.zero_optimization.stage
    whole = frozenset(kind for kind, least in SHARDED_FROM.items() if ranks > 1 and stage < least)
    in_backward = config.infinity.update_in_backward
    return [
        Placement(dict(zip(STREAMED_KINDS, tiers, strict=True)), device_is_host, moments, in_backward, whole, ranks)
        for tiers in product(*(allowed[kind] for kind in STREAMED_KINDS))
    ]


def with_ratio(placement: Placement, partition: Partition, config: Config) -> Placement:
    """As much of what an offload block offloads as its ``ratio`` says: the first units stay on the device."""
    zero, apart = config.zero_optimization, dict(placement.apart)
    for block, kinds in ((zero.offload_param, [StateKind.PARAM]), (zero.offload_optimizer, STREAMED_KINDS[1:])):
        if block is None or block.ratio == 1.0 or block.tier in (None, Tier.DEVICE):
            continue
        for kind in kinds:
            if kind in placement.whole or placement[kind] is Tier.DEVICE:
                continue
            left = int((1 - block.ratio) * placement.total(kind, partition))
            for unit in partition.units:
                left -= placement.nbytes(kind, unit)
                if left >= 0 and placement.has(kind, unit):
                    apart[kind, unit.index] = Tier.DEVICE
    return replace(placement, apart=apart)
