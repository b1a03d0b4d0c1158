"""How many slabs of which sizes units take turns in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from infinity.config import Config
from infinity.plan.bill import Plan, PlanLine
from infinity.plan.buffers import wanted_slabs
from infinity.plan.placement import OPTIMIZER_KINDS, Placement
from infinity.shard.partition import Partition, Unit
from infinity.tier import PAGE_BYTES, StateKind, Tier, round_up

PERSISTENT_BYTES = 256 << 10
"""Units up to this size keep a slab of their own: fetching them again costs more than it saves."""

AUTO_SLABS = 4
"""Slabs per size when the device budget is "auto": in use, used last, on their way in twice."""

GRAD_SLABS = 2


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


def grad_slabs(placement: Placement, units: Sequence[Unit], partition: Partition) -> int:
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


def with_param_slabs(plan: Plan, partition: Partition, config: Config, *, spare: bool) -> Plan:
    """How many slabs of each size: as many as are lent at once, then as many as the budget gives, evenly over sizes.

    Without ``spare`` no more than ``AUTO_SLABS`` even if the budget gives more, which is left to what else may use it.
    """
    fetched = plan.placement.fetched(partition)
    if not fetched:
        return plan
    classes = slab_classes(fetched, [unit.layout.nbytes() for unit in fetched])
    counts = _lent_at_once(partition, classes)
    budget, wanted = plan.budgets[Tier.DEVICE], wanted_slabs(config, partition, max(counts.values(), default=1))
    used = plan.total(Tier.DEVICE) + sum(count * round_up(nbytes, PAGE_BYTES) for nbytes, count in counts.items())
    small = [nbytes for nbytes in sorted(classes) if nbytes <= PERSISTENT_BYTES and wanted == "auto"]
    ceiling = len(partition.units) if budget is not None and spare else AUTO_SLABS
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
        largest = {size_of[piece.unit]: piece.unit for piece in matrix.pieces if piece.unit in size_of}
        uses |= {(path, (unit,)) for path, _ in matrix.homes for unit in largest.values()}
    for path, units in uses:
        around = [other.units for other in partition.entries if _encloses(other.path, path)]
        members = {index for members in [*around, units] for index in members}
        lent = Counter(size_of[index] for index in members if index in size_of)
        for nbytes, count in lent.items():
            counts[nbytes] = max(counts[nbytes], count)
    return counts


def _encloses(outer: str, inner: str) -> bool:
    return outer in ("", inner) or inner.startswith(f"{outer}.")
