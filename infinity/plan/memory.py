"""Chooses bytes per tier by purpose that fit the budgets, or refuses with what would fit."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from infinity.config import Config
from infinity.config.size import format_bytes, is_decimal
from infinity.errors import CapacityError
from infinity.plan.auto import filled
from infinity.plan.bill import Plan, PlanLine, unit_inputs
from infinity.plan.buffers import buffered_ring, wanted_slabs, within_buffer
from infinity.plan.micro_batch import MicroBatch
from infinity.plan.placement import OPTIMIZER_KINDS, STREAMED_KINDS, Placement, candidates
from infinity.plan.ram import available_host_memory, installed_host_memory
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
    micro_batch: MicroBatch | None = None,
    together: int = 1,
) -> Plan:
    """The first placement the config allows that fits every budget.

    Without ``moments`` the optimizer is torch's: it is given whole units, and its own state is not in the plan. The
    plan is one rank's; ``local_ranks`` of them share this machine's RAM. With ``micro_batch`` the plan has unit inputs
    that leave the device, of ``together`` micro-batches at once; without it the first step learns them.

    Raises ``CapacityError`` naming the tier, the unit that decides, the smallest budget that works.
    """
    budgets = {tier: _budget(tier, config, device_is_host, local_ranks) for tier in Tier}
    refusals = []
    ranks = partition.units[0].layout.world_size if partition.units else 1
    for placement in candidates(config, device_is_host=device_is_host, moments=moments, ranks=ranks):
        try:
            inputs: tuple[PlanLine, ...] = ()
            if micro_batch is not None:
                inputs = unit_inputs(*micro_batch.away(config.tier_of(StateKind.ACTIVATION) or Tier.DEVICE, together))
            plan = _plan(partition, config, placement, budgets, read_ahead, local_ranks, inputs)
            plan = replace(plan, micro_batch=micro_batch)
            available = available_host_memory() // local_ranks if device_is_host else sys.maxsize
            split = filled(plan, partition, config, available)
            if not split.near:
                return plan
            plan = _plan(partition, config, split, budgets, read_ahead, local_ranks, inputs)
            return replace(plan, micro_batch=micro_batch)
        except CapacityError as error:
            refusals.append(error)
    raise min(refusals, key=lambda refusal: refusal.missing)


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
    partition: Partition,
    config: Config,
    placement: Placement,
    budgets: dict[Tier, int | None],
    read_ahead: int,
    local_ranks: int,
    inputs: tuple[PlanLine, ...],
) -> Plan:
    trained = [unit for unit in partition.units if unit.trainable]
    lines = _state_lines(placement, partition)
    grad_slabs: dict[int, int] = {}
    if placement.in_backward or placement[StateKind.GRAD] is Tier.NVME:
        sizes = [unit.layout.shard_nbytes(torch.float32) for unit in trained]
        grad_slabs = {
            nbytes: _grad_slabs(placement, units, partition) for nbytes, units in slab_classes(trained, sizes).items()
        }
    lines += [PlanLine(Tier.HOST, "gradient slabs", count, nbytes) for nbytes, count in grad_slabs.items()]
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
        lines += [PlanLine(Tier.DEVICE, "gradients to send", count, each) for each, count in collection_slabs.items()]
        lines.append(PlanLine(Tier.DEVICE, "gradients received", 1, received))
    lines += inputs
    update_read, update_written = _update_traffic(placement, trained)
    base = Plan(
        placement, tuple(lines), budgets, {}, grad_slabs, {}, 0, partition.parameters, partition.trained_parameters,
        read_ahead, 0, update_read, update_written, collection_slabs, received,
    )  # fmt: skip
    biggest = max(partition.units, key=lambda unit: unit.layout.nbytes(), default=None)
    if biggest is not None:
        base = replace(base, largest=(biggest.name, biggest.layout.nbytes()))
    plan = _with_subgroups(_with_param_slabs(base, partition, config), trained, config)
    _check_budgets(plan, partition)
    if placement.device_is_host:
        _check_ram(plan, local_ranks)
    return plan


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


def _grad_slabs(placement: Placement, units: Sequence[Unit], partition: Partition) -> int:
    """Slabs for ``units``: one that fills while another goes home.

    A gradient that is consumed in backward is there until its update is made. Without NVMe that is on the spot. Else
    updates are slower than backward, which never waits for one if every unit has a slab: where gradients may stay in
    memory. Where they are to be on NVMe two more slabs let an update, another's reads, backward go on side by side.
    """
    if not placement.in_backward:
        return min(len(units), GRAD_SLABS)
    waits = any(placement[kind] is Tier.NVME for kind in (StateKind.PARAM, *OPTIMIZER_KINDS))
    if not waits:
        return min(len(units), max(GRAD_SLABS, _open_at_once(units, partition)))
    if placement[StateKind.GRAD] is not Tier.NVME:
        return len(units)
    return min(len(units), GRAD_SLABS + _open_at_once(units, partition))


def _open_at_once(units: Sequence[Unit], partition: Partition) -> int:
    """How many of ``units`` have an incomplete gradient at once, at most, in the backward of one forward.

    Those of a call and of the calls around it, which end later; those that several entries use wait for the last.
    """
    used_by = _callers_of_tiles(partition)
    for entry in partition.entries:
        for index in entry.units:
            used_by.setdefault(index, set()).add(entry.path)
    used_by = {unit.index: used_by[unit.index] for unit in units if unit.index in used_by}

    def is_open(paths: set[str], at: str) -> bool:
        return len(paths) > 1 or any(_encloses(path, at) for path in paths)

    return max(sum(is_open(paths, entry.path) for paths in used_by.values()) for entry in partition.entries)


def _callers_of_tiles(partition: Partition) -> dict[int, set[str]]:
    """By unit index of each tile, the entries in whose calls it is used."""
    paths = [entry.path for entry in partition.entries]
    found: dict[int, set[str]] = {}
    for matrix in partition.tiled:
        around = ([path for path in paths if _encloses(path, home)] for home, _ in matrix.homes)
        callers = {max(enclosing, key=len, default="") for enclosing in around}
        found |= {piece.unit: callers for piece in matrix.pieces}
    return found


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


def _with_param_slabs(plan: Plan, partition: Partition, config: Config) -> Plan:
    """How many slabs of each size: as many as are lent at once, then as many as the budget gives, evenly over sizes."""
    if plan.placement.lends_in_place:
        return plan
    classes = slab_classes(partition.units, [unit.layout.nbytes() for unit in partition.units])
    counts = _lent_at_once(partition, classes)
    budget, wanted = plan.budgets[Tier.DEVICE], wanted_slabs(config, partition, max(counts.values(), default=1))
    used = plan.total(Tier.DEVICE) + sum(count * round_up(nbytes, PAGE_BYTES) for nbytes, count in counts.items())
    small = [nbytes for nbytes in sorted(classes) if nbytes <= PERSISTENT_BYTES and wanted == "auto"]
    ceiling = len(partition.units) if budget is not None else AUTO_SLABS
    for sizes, limit in ((small, len(partition.units)), (sorted(classes), ceiling if wanted == "auto" else wanted)):
        growing = True
        while growing:
            growing = False
            for nbytes in sizes:
                cost = round_up(nbytes, PAGE_BYTES)
                if counts[nbytes] < min(limit, len(classes[nbytes])) and (budget is None or used + cost <= budget):
                    counts[nbytes] += 1
                    used += cost
                    growing = True
    slabs = tuple(PlanLine(Tier.DEVICE, "parameter slabs", count, nbytes) for nbytes, count in counts.items())
    return replace(plan, param_slabs=counts, lines=plan.lines + slabs)


def _lent_at_once(partition: Partition, classes: dict[int, list[Unit]]) -> dict[int, int]:
    """Slabs of each size that one call needs: its own units, or one tile, with those of every call around it."""
    size_of = {unit.index: nbytes for nbytes, units in classes.items() for unit in units}
    counts = dict.fromkeys(classes, 1)
    uses = {(entry.path, entry.units) for entry in partition.entries}
    for matrix in partition.tiled:
        largest = {size_of[piece.unit]: piece.unit for piece in matrix.pieces}
        uses |= {(path, (unit,)) for path, _ in matrix.homes for unit in largest.values()}
    for path, units in uses:
        around = [other.units for other in partition.entries if _encloses(other.path, path)]
        lent = Counter(size_of[index] for index in {index for members in [*around, units] for index in members})
        for nbytes, count in lent.items():
            counts[nbytes] = max(counts[nbytes], count)
    return counts


def _encloses(outer: str, inner: str) -> bool:
    return outer in ("", inner) or inner.startswith(f"{outer}.")


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
