"""The bill of materials: bytes per tier by purpose, chosen to fit the budgets or refused with what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil

from infinity.config import Config
from infinity.config.size import format_bytes
from infinity.errors import CapacityError
from infinity.plan.placement import OPTIMIZER_KINDS, STREAMED_KINDS, Placement, candidates
from infinity.shard.partition import Partition, Unit
from infinity.shard.subgroups import subgroups
from infinity.tier import PAGE_BYTES, StateKind, Tier, round_up

PERSISTENT_BYTES = 256 << 10
"""Units up to this size keep a slab of their own: fetching them again costs more than it saves."""

AUTO_SLABS = 4
"""Slabs per size when the device budget is "auto": in use, used last, on their way in twice."""

AUTO_HOST_FRACTION = 0.8
"""Share of the RAM still available that "auto" lets streamed state use; the rest is the model's own activations."""

AUTO_SUBGROUP_NUMEL = 2 << 20
MIN_SUBGROUP_NUMEL = 64 << 10
READ_AHEAD = 2
WRITE_BEHIND = 2
GRAD_SLABS = 2


@dataclass(frozen=True)
class PlanLine:
    """``count`` regions of ``nbytes`` each on one tier."""

    tier: Tier
    purpose: str
    count: int
    nbytes: int

    @property
    def total(self) -> int:
        return self.count * round_up(self.nbytes, PAGE_BYTES)


@dataclass(frozen=True)
class Plan:
    """Everything the engine will allocate, tier by tier, with the choices that led to it.

    ``param_slabs`` and ``grad_slabs`` map a slab size in bytes to how many there are; ``subgroup_numel`` is in
    elements; ``ring`` is how many sub-groups may be in flight between read-ahead and write-behind.
    """

    placement: Placement
    lines: tuple[PlanLine, ...]
    budgets: dict[Tier, int | None]
    param_slabs: dict[int, int]
    grad_slabs: dict[int, int]
    subgroup_numel: int
    parameters: int
    trained_parameters: int
    read_ahead: int
    ring: int

    def total(self, tier: Tier) -> int:
        """Planned bytes of ``tier``."""
        return sum(line.total for line in self.lines if line.tier is tier)

    def render(self) -> str:
        """The plan as a table of plain text."""
        head = f"{self.parameters:,} parameters, {self.trained_parameters:,} trained"
        rows = [("tier", "purpose", "count", "each", "total")]
        for tier in Tier:
            lines = [line for line in self.lines if line.tier is tier and line.total]
            for line in lines:
                each, total = format_bytes(line.nbytes), format_bytes(line.total)
                rows.append((tier.value, line.purpose, str(line.count), each, total))
            budget = self.budgets[tier]
            limit = "no limit" if budget is None else f"of {format_bytes(budget)}"
            rows.append((tier.value, "= planned", "", limit, format_bytes(self.total(tier))))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        body = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        body.insert(1, "-" * len(body[0]))
        return "\n".join([head, *body, f"optimizer sub-group: {self.subgroup_numel:,} elements, {self.ring} in flight"])


def plan_memory(
    partition: Partition, config: Config, *, device_is_host: bool = True, read_ahead: int = READ_AHEAD
) -> Plan:
    """The first placement the config allows that fits every budget.

    Raises ``CapacityError`` naming the tier, the unit that decides, the smallest budget that works.
    """
    budgets = {tier: _budget(tier, config) for tier in Tier}
    refusal: CapacityError | None = None
    for placement in candidates(config, device_is_host=device_is_host):
        try:
            return _plan(partition, config, placement, budgets, read_ahead)
        except CapacityError as error:
            refusal = error
    assert refusal is not None
    raise refusal


def slab_classes(units: Sequence[Unit], sizes: Sequence[int]) -> dict[int, list[Unit]]:
    """Units grouped by the slab size that serves them: at most a quarter of a slab is ever left unused."""
    classes: dict[int, list[Unit]] = {}
    ceiling = 0
    for size, _, unit in sorted(
        ((size, unit.index, unit) for unit, size in zip(units, sizes, strict=True)), reverse=True
    ):
        if not ceiling or size < ceiling - ceiling // 4:
            ceiling = size
        classes.setdefault(ceiling, []).append(unit)
    return classes


def _plan(
    partition: Partition, config: Config, placement: Placement, budgets: dict[Tier, int | None], read_ahead: int
) -> Plan:
    trained = [unit for unit in partition.units if unit.trainable]
    lines = [
        PlanLine(placement[kind], f"{_NAMES[kind]}, resident", 1, placement.total(kind, partition))
        for kind in STREAMED_KINDS
        if placement[kind] is not Tier.NVME
    ]
    lines += [
        PlanLine(Tier.NVME, f"{_NAMES[kind]}, swap", 1, placement.total(kind, partition))
        for kind in STREAMED_KINDS
        if placement[kind] is Tier.NVME
    ]
    param_classes: dict[int, list[Unit]] = {}
    if not placement.lends_in_place:
        param_classes = slab_classes(partition.units, [unit.layout.nbytes() for unit in partition.units])
    grad_slabs: dict[int, int] = {}
    if placement[StateKind.GRAD] is Tier.NVME:
        sizes = [placement.nbytes(StateKind.GRAD, unit) for unit in trained]
        grad_slabs = {nbytes: min(GRAD_SLABS, len(units)) for nbytes, units in slab_classes(trained, sizes).items()}
    lines += [PlanLine(Tier.HOST, "gradient staging", count, nbytes) for nbytes, count in grad_slabs.items()]

    base = Plan(
        placement, tuple(lines), budgets, {}, grad_slabs, 0, partition.parameters, partition.trained_parameters,
        read_ahead, read_ahead + 1 + WRITE_BEHIND,
    )  # fmt: skip
    param_slabs = _param_slabs(base, param_classes, config)
    lines += [PlanLine(Tier.DEVICE, "parameter slabs", count, nbytes) for nbytes, count in param_slabs.items()]
    base = replace(base, param_slabs=param_slabs, lines=tuple(lines))
    plan = _with_subgroups(base, trained, config)
    for tier in Tier:
        _check(plan, tier)
    if placement.device_is_host:
        _check_ram(plan)
    return plan


def _param_slabs(plan: Plan, classes: dict[int, list[Unit]], config: Config) -> dict[int, int]:
    """How many slabs of each size: one at least, then as many as the budget gives, evenly over the sizes."""
    if not classes:
        return {}
    budget = plan.budgets[Tier.DEVICE]
    counts = {nbytes: len(units) if nbytes <= PERSISTENT_BYTES else 1 for nbytes, units in classes.items()}
    used = plan.total(Tier.DEVICE) + sum(count * round_up(nbytes, PAGE_BYTES) for nbytes, count in counts.items())
    if budget is not None and used > budget:
        largest = max(classes)
        raise CapacityError(
            f'device memory: unit "{classes[largest][0].name}" alone needs a slab of {format_bytes(largest)}, all '
            f"slab sizes once need {used} bytes, but infinity.device_memory is {budget}. Raise it to at least {used} "
            f"bytes, or make units smaller (infinity.units)"
        )
    wanted = config.infinity.slabs
    limit = AUTO_SLABS if budget is None else max(len(units) for units in classes.values())
    ceiling = limit if wanted == "auto" else int(wanted)
    growing = True
    while growing:
        growing = False
        for nbytes in sorted(classes):
            if counts[nbytes] >= min(ceiling, len(classes[nbytes])):
                continue
            if budget is not None and used + round_up(nbytes, PAGE_BYTES) > budget:
                continue
            counts[nbytes] += 1
            used += round_up(nbytes, PAGE_BYTES)
            growing = True
    return counts


def _with_subgroups(plan: Plan, trained: Sequence[Unit], config: Config) -> Plan:
    """Chooses the sub-group size, then adds the staging ring of every kind that the optimizer streams."""
    largest = max((unit.layout.shard_numel for unit in trained), default=0)
    per_element = staging_bytes_per_element(plan.placement, trained)
    if not trained or not per_element:
        return replace(plan, subgroup_numel=max(largest, 1))
    given = config.zero_optimization.sub_group_size
    budget = plan.budgets[Tier.HOST]
    numel = min(largest, AUTO_SUBGROUP_NUMEL)
    if given != "auto" and "sub_group_size" in config.zero_optimization.model_fields_set:
        numel = min(largest, int(given))
    elif budget is not None:
        left = budget - plan.total(Tier.HOST)
        while numel > MIN_SUBGROUP_NUMEL and plan.ring * sum(per_element.values()) * numel > left:
            numel //= 2
    numel = round_up(max(numel, 1), PAGE_BYTES // 2)
    groups = sum(len(subgroups(unit.layout.shard_numel, numel)) for unit in trained)
    plan = replace(plan, subgroup_numel=numel, ring=min(plan.ring, groups))
    ring = tuple(
        PlanLine(Tier.HOST, f"{_NAMES[kind]} staging", plan.ring, numel * nbytes)
        for kind, nbytes in per_element.items()
    )
    return replace(plan, lines=plan.lines + ring)


def staging_bytes_per_element(placement: Placement, trained: Sequence[Unit]) -> dict[StateKind, int]:
    """Bytes per element of each kind that the optimizer must stage because it lives on NVMe."""
    return {
        kind: max(placement.dtype(kind, unit).itemsize for unit in trained if placement.has(kind, unit))
        for kind in (StateKind.GRAD, StateKind.PARAM, *OPTIMIZER_KINDS)
        if placement[kind] is Tier.NVME and any(placement.has(kind, unit) for unit in trained)
    }


def _check(plan: Plan, tier: Tier) -> None:
    budget, needed = plan.budgets[tier], plan.total(tier)
    if budget is None or needed <= budget:
        return
    biggest = max((line for line in plan.lines if line.tier is tier), key=lambda line: line.total)
    key = "nvme_space" if tier is Tier.NVME else f"{tier.value}_memory"
    remedy = {
        Tier.DEVICE: "or offload to a slower tier (zero_optimization.offload_param / offload_optimizer)",
        Tier.HOST: "or set a smaller zero_optimization.sub_group_size, or place a kind on NVMe (infinity.placement)",
        Tier.NVME: "or keep a kind in host memory (infinity.placement)",
    }[tier]
    raise CapacityError(
        f"{tier.value} memory: the plan needs {needed} bytes ({format_bytes(needed)}), most of it for "
        f"{biggest.purpose} ({format_bytes(biggest.total)}), but infinity.{key} is {budget} ({format_bytes(budget)}). "
        f"Raise it to at least {needed} bytes, {remedy}"
    )


def _check_ram(plan: Plan) -> None:
    needed, available = plan.total(Tier.DEVICE) + plan.total(Tier.HOST), available_host_memory()
    if needed > available:
        raise CapacityError(
            f"RAM: the plan needs {format_bytes(needed)} for device and host memory together, but this machine or its "
            f"cgroup has {format_bytes(available)} left. Offload to NVMe (offload_param, offload_optimizer) or lower "
            "infinity.device_memory and infinity.host_memory"
        )


def _budget(tier: Tier, config: Config) -> int | None:
    """The budget in bytes; None where "auto" leaves a modest choice to the plan (device) or to the disk (NVMe)."""
    own = config.infinity
    given = {Tier.DEVICE: own.device_memory, Tier.HOST: own.host_memory, Tier.NVME: own.nvme_space}[tier]
    if given != "auto":
        return int(given)
    return int(available_host_memory() * AUTO_HOST_FRACTION) if tier is Tier.HOST else None


def available_host_memory() -> int:
    """Bytes of RAM this process may still use: what the system has left, or less where a cgroup says so."""
    available = int(psutil.virtual_memory().available)
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit_file) as limit, open(usage_file) as usage:
                text = limit.read().strip()
                if text != "max":
                    available = min(available, int(text) - int(usage.read()))
        except (OSError, ValueError):
            continue
    return available


_NAMES = {
    StateKind.PARAM: "parameters",
    StateKind.GRAD: "gradients",
    StateKind.MASTER: "fp32 masters",
    StateKind.EXP_AVG: "exp_avg",
    StateKind.EXP_AVG_SQ: "exp_avg_sq",
}
