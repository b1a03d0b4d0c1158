"""Which tier each kind of state is on."""

from __future__ import annotations

from dataclasses import dataclass
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
    near: frozenset[tuple[StateKind, int]] = frozenset()
    """Kinds of single units, by index, that are in host memory although their kind is on NVMe: it has two tiers."""

    def __getitem__(self, kind: StateKind) -> Tier:
        return self.tiers[kind]

    def tier(self, kind: StateKind, unit: Unit) -> Tier:
        """Where ``unit`` keeps state of ``kind``."""
        return Tier.HOST if (kind, unit.index) in self.near else self.tiers[kind]

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

    @property
    def lends_in_place(self) -> bool:
        """Whether parameters are used where they are kept, so that nothing is fetched."""
        tier = self.tiers[StateKind.PARAM]
        return not self.gathers and (tier is Tier.DEVICE or (tier is Tier.HOST and self.device_is_host))


SHARDED_FROM = {StateKind.PARAM: 3, StateKind.GRAD: 2, **dict.fromkeys(OPTIMIZER_KINDS, 1)}
"""The stage of ``zero_optimization`` from which on a rank keeps only its slice of a kind."""


def candidates(config: Config, *, device_is_host: bool, moments: bool = True, ranks: int = 1) -> list[Placement]:
    """The placements the config allows, most preferred first; more than one where it leaves a kind to the plan."""
    fastest_first = [Tier.DEVICE, Tier.HOST, Tier.NVME]
    choices: dict[StateKind, list[Tier]] = {}
    for kind in STREAMED_KINDS:
        tier = config.tier_of(kind)
        usable = [other for other in fastest_first if other is not Tier.NVME or config.swap_directories(kind)]
        choices[kind] = usable if tier is None else [tier]
    explicit = config.infinity.placement
    if explicit == "auto" or StateKind.GRAD not in explicit:
        # Gradients follow the optimizer; behind an optimizer on NVMe they stay in host memory while they fit.
        follow = choices[StateKind.EXP_AVG]
        choices[StateKind.GRAD] = [Tier.HOST, Tier.NVME] if follow == [Tier.NVME] else follow
    stage = config.zero_optimization.stage
    whole = frozenset(kind for kind, least in SHARDED_FROM.items() if ranks > 1 and stage < least)
    found: list[Placement] = []
    for optimizer_tiers in product(*(choices[kind] for kind in OPTIMIZER_KINDS)):
        for param, grad in product(choices[StateKind.PARAM], choices[StateKind.GRAD]):
            tiers = dict(zip(OPTIMIZER_KINDS, optimizer_tiers, strict=True))
            tiers |= {StateKind.PARAM: param, StateKind.GRAD: grad}
            in_backward = config.infinity.update_in_backward
            found.append(Placement(dict(tiers), device_is_host, moments, in_backward, whole, ranks))
    return found
