"""The bill of materials: every region of every tier, with the choices that led to it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from infinity.config.size import format_bytes, is_decimal
from infinity.plan.placement import Placement
from infinity.plan.waiting import Waiting
from infinity.tier import PAGE_BYTES, StateKind, Tier, round_up


@dataclass(frozen=True)
class PlanLine:
    """``count`` regions of ``nbytes`` each on one tier, cut out of its arena or beside it."""

    tier: Tier
    purpose: str
    count: int
    nbytes: int
    in_arena: bool = True

    @property
    def total(self) -> int:
        return self.count * round_up(self.nbytes, PAGE_BYTES)


@dataclass(frozen=True)
class Plan:
    """Everything the engine will allocate, tier by tier, with the choices that led to it.

    ``param_slabs`` and ``grad_slabs`` map a slab size in bytes to how many there are; ``subgroup_numel`` is in
    elements; ``staging`` are the slabs through which the optimizer streams the kinds that live on NVMe, ``ring`` how
    many sub-groups are in flight between read-ahead and write-behind. ``update_read`` and ``update_written`` are the
    NVMe bytes of one optimizer step in which every trained parameter has a gradient. With several ranks
    ``collection_slabs`` maps the size of a slab in which a unit's gradients are collected for the others to how many
    there are; ``received_bytes`` takes in what the others send of one unit. ``largest`` is the largest unit
    by name with its bytes in compute dtype, ``waiting`` what of a micro-batch waits for backward, if one is known.
    """

    placement: Placement
    lines: tuple[PlanLine, ...]
    budgets: dict[Tier, int | None]
    param_slabs: dict[int, int]
    grad_slabs: dict[int, int]
    staging: dict[StateKind, PlanLine]
    subgroup_numel: int
    parameters: int
    trained_parameters: int
    read_ahead: int
    ring: int
    update_read: int
    update_written: int
    collection_slabs: dict[int, int] = field(default_factory=dict)
    received_bytes: int = 0
    waiting: Waiting | None = None
    largest: tuple[str, int] | None = None

    def total(self, tier: Tier) -> int:
        """Planned bytes of ``tier``."""
        return sum(line.total for line in self.lines if line.tier is tier)

    def arena_bytes(self, tier: Tier) -> int:
        """Planned bytes of ``tier`` that its arena is cut into; the rest is what waits for backward."""
        return sum(line.total for line in self.lines if line.tier is tier and line.in_arena)

    def with_unit_inputs(self, host: int, nvme: int) -> Plan:
        """The plan with what the inputs of recomputed units were seen to need away from the device, in bytes."""
        if not host:
            return self
        others = tuple(line for line in self.lines if line.in_arena or line.tier is Tier.DEVICE)
        return replace(self, lines=others + unit_inputs(host, nvme))

    @property
    def decimal(self) -> bool:
        """Whether budgets were given in MB, not in MiB."""
        return any(budget is not None and is_decimal(budget) for budget in self.budgets.values())

    def render(self) -> str:
        """The plan as a table, in the units (MB or MiB) that budgets were given in."""
        head = f"{self.parameters:,} parameters, {self.trained_parameters:,} trained"
        rows = [("tier", "purpose", "count", "each", "total")]
        decimal = self.decimal
        for tier in Tier:
            budget = self.budgets[tier]
            for line in self.lines:
                if line.tier is tier and line.total:
                    each, total = format_bytes(line.nbytes, decimal), format_bytes(line.total, decimal)
                    rows.append((tier.value, line.purpose, str(line.count), each, total))
            limit = "no limit" if budget is None else f"of {format_bytes(budget, decimal)}"
            rows.append((tier.value, "= planned", "", limit, format_bytes(self.total(tier), decimal)))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        body = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        body.insert(1, "-" * len(body[0]))
        tail = []
        if self.ring:
            tail.append(f"optimizer sub-group: {self.subgroup_numel:,} elements, {self.ring} in flight")
        if self.largest is not None:
            tail.append(f"largest unit: {self.largest[0]}, {format_bytes(self.largest[1], decimal)}")
        waiting = self.waiting
        if waiting is not None:
            logits = format_bytes(waiting.micro_batch.logits, decimal)
            tail += waiting.told()
            tail.append(
                f"outside the budgets: {format_bytes(waiting.outside, decimal)} of activations, temporaries, gradients "
                f"on their way at the peak of a micro-batch; its logits are {logits}"
            )
        return "\n".join([head, *body, *tail])

    def as_json(self) -> dict[str, Any]:
        """The plan as plain values; every size in bytes, for one rank."""
        waiting = self.waiting
        return {
            "parameters": self.parameters,
            "trained_parameters": self.trained_parameters,
            "tiers": {
                tier.value: {
                    "budget_bytes": self.budgets[tier],
                    "planned_bytes": self.total(tier),
                    "lines": [
                        {"purpose": line.purpose, "count": line.count, "bytes": line.nbytes, "total_bytes": line.total}
                        for line in self.lines
                        if line.tier is tier and line.total
                    ],
                }
                for tier in Tier
            },
            "largest_unit": None if self.largest is None else {"name": self.largest[0], "bytes": self.largest[1]},
            "subgroup_numel": self.subgroup_numel,
            "update_read_bytes": self.update_read,
            "update_written_bytes": self.update_written,
            "micro_batch": None
            if waiting is None
            else {
                "tokens": waiting.micro_batch.tokens,
                "unit_input_bytes": sum(one.nbytes for one in waiting.micro_batch.inputs),
                "outside_bytes": waiting.outside,
                "logits_bytes": waiting.micro_batch.logits,
                "units_kept": sorted(waiting.kept),
                "inputs_staying": sorted(waiting.staying),
            },
        }


def unit_inputs(host: int, nvme: int) -> tuple[PlanLine, ...]:
    """What the inputs of recomputed units need away from the device, in bytes."""
    inputs = PlanLine(Tier.HOST, "unit inputs, window" if nvme else "unit inputs", 1, host, in_arena=False)
    swap = PlanLine(Tier.NVME, "unit inputs, swap", 1, nvme, in_arena=False)
    return tuple(line for line in (inputs, swap) if line.nbytes)


def waiting_lines(waiting: Waiting) -> tuple[PlanLine, ...]:
    """What waits for backward on each tier."""
    device = PlanLine(Tier.DEVICE, "activations until backward", 1, waiting.device, in_arena=False)
    return ((device,) if waiting.device else ()) + unit_inputs(waiting.host, waiting.nvme)
