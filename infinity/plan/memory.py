"""Chooses bytes per tier by purpose that fit the budgets, or refuses with what would fit."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from infinity.config import Config
from infinity.config.size import format_bytes, is_decimal
from infinity.errors import CapacityError
from infinity.plan.auto import filled
from infinity.plan.bill import Plan, PlanLine, waiting_lines
from infinity.plan.buffers import buffered_ring, within_buffer
from infinity.plan.placement import OPTIMIZER_KINDS, STREAMED_KINDS, Placement, candidates, with_ratio
from infinity.plan.ram import available_host_memory, installed_host_memory
from infinity.plan.slabs import grad_slabs, slab_classes, with_param_slabs
from infinity.plan.waiting import Waiting, Waits
from infinity.shard.partition import Partition, Unit
from infinity.shard.subgroups import subgroups
from infinity.tier import PAGE_BYTES, StateKind, Tier, round_up

AUTO_HOST_FRACTION = 0.8
"""Share of the RAM still available that "auto" lets streamed state use; the rest is the model's own activations."""

AUTO_SUBGROUP_NUMEL = 2 << 20
MIN_SUBGROUP_NUMEL = 64 << 10
READ_AHEAD = 2
WRITE_BEHIND = 2
COLLECTION_SLABS = 2
"""Units whose gradients may be on their way to other ranks, or be collected for it, per slab size."""


def plan_memory(
    partition: Partition,
    config: Config,
    *,
    device_is_host: bool = True,
    read_ahead: int = READ_AHEAD,
    moments: bool = True,
    local_ranks: int = 1,
    waits: Waits | None = None,
) -> Plan:
    """The first placement the config allows that fits every budget.

    Without ``moments`` the optimizer is torch's: it is given whole units, and its own state is not in the plan. The
    plan is one rank's; ``local_ranks`` of them share this machine's RAM. With ``waits`` a micro-batch is known, so the
    plan has what waits for its backward; without it the first step learns which unit inputs leave the device.

    Raises ``CapacityError`` naming the tier, the unit that decides, the smallest budget that works.
    """
    budgets = {tier: _budget(tier, config, device_is_host, local_ranks) for tier in Tier}
    available = available_host_memory() // local_ranks if device_is_host else sys.maxsize
    refusals = []
    ranks = partition.units[0].layout.world_size if partition.units else 1
    for placement in candidates(config, device_is_host=device_is_host, moments=moments, ranks=ranks):
        try:
            placement = with_ratio(placement, partition, config)
            base = _Base(partition, config, budgets, read_ahead, local_ranks)
            if waits is not None:
                base = replace(base, waiting=waits.within(*_room(base.plan(placement, spare=False))))
            plan = base.checked(placement)
            split = filled(placement, partition, config, base.left(placement, available))
            if split == placement:
                return plan
            try:
                return base.checked(split)
            except CapacityError:  # fewer units in slabs may be units of more sizes
                return plan
        except CapacityError as error:
            refusals.append(error)
    raise min(refusals, key=lambda refusal: refusal.missing)


@dataclass(frozen=True)
class _Base:
    """What a plan is made from beside its placement."""

    partition: Partition
    config: Config
    budgets: dict[Tier, int | None]
    read_ahead: int
    local_ranks: int
    waiting: Waiting | None = None

    def checked(self, placement: Placement) -> Plan:
        """The plan for ``placement``, within its budgets, within the machine's RAM."""
        plan = self.plan(placement, spare=True)
        _check_budgets(plan, self.partition)
        if placement.device_is_host:
            _check_ram(plan, self.local_ranks)
        return plan

    def left(self, placement: Placement, available: int) -> dict[Tier, int]:
        """Bytes that budgets and RAM (``available``) leave for states that would be on a slower tier.

        None of the device where it has no budget of its own: on a CPU host memory is as near. None of the host as long
        as it is not known how much of it unit inputs take.
        """
        plan = self.plan(placement, spare=False)
        device, host = _room(plan)
        ram = max(0, available - plan.total(Tier.DEVICE) - plan.total(Tier.HOST))
        near = 0 if device is None else min(device, ram)
        unknown = self.waiting is None and self.config.tier_of(StateKind.ACTIVATION) is not Tier.DEVICE
        return {Tier.DEVICE: near, Tier.HOST: 0 if unknown else min(host, ram - near)}

    def plan(self, placement: Placement, *, spare: bool) -> Plan:
        """The plan for ``placement``, whatever the budgets; without ``spare`` with few slabs only."""
        partition = self.partition
        trained = [unit for unit in partition.units if unit.trainable]
        lines = _state_lines(placement, partition)
        passing = placement.summed_in_slabs(partition)
        sizes = [unit.layout.shard_nbytes(torch.float32) for unit in passing]
        slabs = {
            nbytes: grad_slabs(placement, units, partition) for nbytes, units in slab_classes(passing, sizes).items()
        }
        lines += [PlanLine(Tier.HOST, "gradient slabs", count, nbytes) for nbytes, count in slabs.items()]
        collection_slabs: dict[int, int] = {}
        received = 0
        if placement.ranks > 1 and trained:
            classes = slab_classes(trained, [unit.layout.nbytes() for unit in trained])
            users = Counter(index for entry in partition.entries for index in entry.units)
            collection_slabs = {
                nbytes: min(COLLECTION_SLABS, len(units)) + sum(max(0, users[unit.index] - 1) for unit in units)
                for nbytes, units in classes.items()
            }
            sums = torch.float32 if StateKind.GRAD in placement.whole else None  # which no_sync leaves to be sent
            received = max(unit.layout.nbytes(sums) - unit.layout.shard_nbytes(sums) for unit in trained)
            lines += [
                PlanLine(Tier.DEVICE, "gradients to send", count, each) for each, count in collection_slabs.items()
            ]
            lines.append(PlanLine(Tier.DEVICE, "gradients received", 1, received))
        if self.waiting is not None:
            lines += waiting_lines(self.waiting)
        update_read, update_written = _update_traffic(placement, trained)
        base = Plan(
            placement, tuple(lines), self.budgets, {}, slabs, {}, 0, partition.parameters,
            partition.trained_parameters, self.read_ahead, 0, update_read, update_written, collection_slabs, received,
            self.waiting,
        )  # fmt: skip
        biggest = max(partition.units, key=lambda unit: unit.layout.nbytes(), default=None)
        if biggest is not None:
            base = replace(base, largest=(biggest.name, biggest.layout.nbytes()))
        return _with_subgroups(with_param_slabs(base, partition, self.config, spare=spare), trained, self.config)


def _room(plan: Plan) -> tuple[int | None, int]:
    """Bytes that the budgets leave on the device (None: it has none), on the host."""
    device, host = plan.budgets[Tier.DEVICE], plan.budgets[Tier.HOST]
    left = None if device is None else max(0, device - plan.total(Tier.DEVICE))
    return left, sys.maxsize if host is None else max(0, host - plan.total(Tier.HOST))


def _state_lines(placement: Placement, partition: Partition) -> list[PlanLine]:
    """What is kept of every kind on each of its tiers, swap last."""
    lines = []
    for kind in STREAMED_KINDS:
        for tier in Tier:
            nbytes = placement.total(kind, partition, tier)
            if nbytes or tier is placement[kind]:
                how = "swap" if tier is Tier.NVME else "resident"
                lines.append(PlanLine(tier, f"{_NAMES[kind]}, {how}", 1, nbytes))
    return sorted(lines, key=lambda line: line.tier is Tier.NVME)


def _update_traffic(placement: Placement, trained: Sequence[Unit]) -> tuple[int, int]:
    """NVMe bytes that one step reads, that it writes. A 16-bit copy beside a master is only written."""
    read = written = 0
    for unit in trained:
        for kind in STREAMED_KINDS:
            if placement.tier(kind, unit) is Tier.NVME:
                nbytes = placement.nbytes(kind, unit)
                read += 0 if kind is StateKind.PARAM and placement.has(StateKind.MASTER, unit) else nbytes
                written += 0 if kind is StateKind.GRAD else nbytes
    return read, written


def _with_subgroups(plan: Plan, trained: Sequence[Unit], config: Config) -> Plan:
    """Chooses the sub-group size, then adds the staging slabs of every kind that the optimizer streams."""
    largest = max((plan.placement.updated_numel(unit) for unit in trained), default=1)
    given = config.zero_optimization.sub_group_size if plan.placement.moments else largest
    budget = plan.budgets[Tier.HOST]
    numel = min(largest, AUTO_SUBGROUP_NUMEL if given == "auto" else given)
    limit = plan.read_ahead + 1 + WRITE_BEHIND
    if plan.placement.moments:
        numel = within_buffer(config, numel, asked=given != "auto")
        limit = buffered_ring(config, plan.placement, limit)
        plan = replace(plan, read_ahead=min(plan.read_ahead, limit - 1))
    staged = _with_staging(plan, trained, numel, limit)
    if budget is not None and config.tier_of(StateKind.ACTIVATION) is not Tier.DEVICE:
        # Whether the plan knows the unit inputs or the first step learns them, half of the budget is left to them.
        budget = budget // 2 + sum(
            line.total for line in plan.lines if line.tier is Tier.HOST and line.purpose.startswith("unit inputs")
        )
    while given == "auto" and budget is not None and numel > MIN_SUBGROUP_NUMEL and staged.total(Tier.HOST) > budget:
        numel //= 2
        staged = _with_staging(plan, trained, numel, limit)
    return staged if staged.staging else replace(plan, subgroup_numel=largest)


def _with_staging(plan: Plan, trained: Sequence[Unit], numel: int, limit: int) -> Plan:
    numel = round_up(numel, PAGE_BYTES // 2)
    groups = {unit.index: len(subgroups(plan.placement.updated_numel(unit), numel)) for unit in trained}
    ring = min(plan.read_ahead + 1 + WRITE_BEHIND, limit, sum(groups.values()))
    staging = {}
    for kind, nbytes in staging_bytes_per_element(plan.placement, trained).items():
        # Gradients are only read, so their slabs are free again before anything is written behind.
        depth = plan.read_ahead + 1 if kind is StateKind.GRAD else ring
        staged = (unit for unit in trained if plan.placement.nbytes(kind, unit))
        count = min(depth, sum(groups[unit.index] for unit in staged if plan.placement.tier(kind, unit) is Tier.NVME))
        staging[kind] = PlanLine(Tier.HOST, f"{_NAMES[kind]}, optimizer staging", count, numel * nbytes)
    lines = plan.lines + tuple(staging.values())
    return replace(plan, subgroup_numel=numel, ring=ring, staging=staging, lines=lines)


def staging_bytes_per_element(placement: Placement, trained: Sequence[Unit]) -> dict[StateKind, int]:
    """Bytes per element of each kind that the optimizer must stage because it lives on NVMe."""
    return {
        kind: max(placement.dtype(kind, unit).itemsize for unit in trained if placement.has(kind, unit))
        for kind in (StateKind.GRAD, StateKind.PARAM, *OPTIMIZER_KINDS)
        if any(placement.has(kind, unit) and placement.tier(kind, unit) is Tier.NVME for unit in trained)
    }


def _check_budgets(plan: Plan, partition: Partition) -> None:
    problems, missing = [], 0
    for tier in Tier:
        budget, needed = plan.budgets[tier], plan.total(tier)
        if budget is None or needed <= budget:
            continue
        missing += needed - budget
        biggest = max((line for line in plan.lines if line.tier is tier), key=lambda line: line.total)
        unit = max(partition.units, key=lambda unit: unit.layout.nbytes())
        key = "nvme_space" if tier is Tier.NVME else f"{tier.value}_memory"
        decimal = is_decimal(budget)
        problems.append(
            f"{tier.value} memory: the plan needs {needed} bytes ({format_bytes(needed, decimal)}), most of it for "
            f'{biggest.purpose} ({format_bytes(biggest.total, decimal)}; the largest unit is "{unit.name}", '
            f"{format_bytes(unit.layout.nbytes(), decimal)}), but infinity.{key} is {budget} "
            f"({format_bytes(budget, decimal)}). Raise it "
            f"to at least {needed} bytes, {_REMEDIES[tier]}"
        )
    if problems:
        raise CapacityError("\n".join(problems), missing)


def _check_ram(plan: Plan, local_ranks: int) -> None:
    needed, available = plan.total(Tier.DEVICE) + plan.total(Tier.HOST), available_host_memory() // local_ranks
    if needed > available:
        raise CapacityError(
            f"RAM: the plan needs {format_bytes(needed)} for device and host memory together, but this machine or its "
            f"cgroup has {format_bytes(available)} left{_each(local_ranks)}. Offload to NVMe (offload_param, "
            "offload_optimizer) or lower infinity.device_memory and infinity.host_memory",
            needed - available,
        )


def _each(local_ranks: int) -> str:
    return "" if local_ranks == 1 else f" for each of its {local_ranks} ranks"


def _budget(tier: Tier, config: Config, device_is_host: bool, local_ranks: int) -> int | None:
    """The budget in bytes; None where "auto" leaves a modest choice to the plan (device) or to the disk (NVMe)."""
    own = config.infinity
    given = {Tier.DEVICE: own.device_memory, Tier.HOST: own.host_memory, Tier.NVME: own.nvme_space}[tier]
    if given == "auto":
        return int(available_host_memory() * AUTO_HOST_FRACTION / local_ranks) if tier is Tier.HOST else None
    machine = installed_host_memory() // local_ranks
    is_ram = tier is Tier.HOST or (tier is Tier.DEVICE and device_is_host)
    if is_ram and int(given) > machine:
        raise CapacityError(
            f"infinity.{tier.value}_memory is {given} ({format_bytes(int(given), is_decimal(int(given)))}), but this "
            f"machine, or the cgroup of this process, has {machine} ({format_bytes(machine)}) of RAM"
            f'{_each(local_ranks)}. Set it to the part of that which training may use, or to "auto"',
            int(given) - machine,
        )
    return int(given)


_NAMES = {
    StateKind.PARAM: "parameters",
    StateKind.GRAD: "gradients",
    StateKind.MASTER: "fp32 masters",
    StateKind.EXP_AVG: "exp_avg",
    StateKind.EXP_AVG_SQ: "exp_avg_sq",
}

_REMEDIES = {
    Tier.DEVICE: "or make units smaller (infinity.units, infinity.tile_bytes), or offload more "
    "(zero_optimization.offload_param, offload_optimizer)",
    Tier.HOST: "or set a smaller zero_optimization.sub_group_size, or place a kind on NVMe, such as the gradients "
    '(infinity.placement: {"grad": "nvme"})',
    Tier.NVME: "or keep a kind in host memory (infinity.placement)",
}
