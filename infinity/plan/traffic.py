"""Bytes that one optimizer step moves over each link."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.plan.bill import Plan
from infinity.plan.slabs import slab_classes
from infinity.shard.partition import Partition
from infinity.tier import PAGE_BYTES, StateKind, Tier, round_up


@dataclass(frozen=True)
class StepTraffic:
    """Payload bytes per step, split by the phase that waits for them: forward with backward, or the update."""

    pass_read: int
    pass_written: int
    update_read: int
    update_written: int

    @property
    def read(self) -> int:
        return self.pass_read + self.update_read

    @property
    def written(self) -> int:
        return self.pass_written + self.update_written


def step_traffic(
    plan: Plan, partition: Partition, accumulation: int = 1, *, layer_major: bool = False, inputs_swapped: int = 0
) -> StepTraffic:
    """NVMe traffic of a steady step in which every trained parameter has a gradient.

    A pass over units reads all but those still in their slabs from the pass before: units go forward, then back, so
    the last ones stay. ``layer_major`` is ``train_batch``, where a unit is read once per pass for all micro-batches.
    ``inputs_swapped`` are the bytes of unit inputs that leave for NVMe in all its micro-batches.
    """
    passes = 2 if layer_major else 2 * accumulation
    read = written = 0
    fetched = plan.placement.fetched(partition)
    for nbytes, units in slab_classes(fetched, [unit.layout.nbytes() for unit in fetched]).items():
        sizes = [unit.layout.shard_nbytes() for unit in units]
        swapped = sum(
            size
            for unit, size in zip(units, sizes, strict=True)
            if plan.placement.tier(StateKind.PARAM, unit) is Tier.NVME
        )
        staying = min(1.0, plan.param_slabs.get(nbytes, 0) * max(sizes) / sum(sizes))
        read += swapped + (passes - 1) * round(swapped * (1 - staying))
    gradients = sum(
        round_up(plan.placement.nbytes(StateKind.GRAD, unit), PAGE_BYTES)
        for unit in partition.units
        if plan.placement.tier(StateKind.GRAD, unit) is Tier.NVME
    )
    rounds = 1 if layer_major else accumulation
    written += rounds * gradients
    read += (rounds - 1) * gradients
    return StepTraffic(read + inputs_swapped, written + inputs_swapped, plan.update_read, plan.update_written)
