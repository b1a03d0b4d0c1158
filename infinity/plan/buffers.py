"""Honours the swap buffers that a DeepSpeed config asks for, or says which would do."""

from __future__ import annotations

from typing import Literal

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.plan.placement import OPTIMIZER_KINDS, Placement
from infinity.shard.partition import Partition
from infinity.tier import PAGE_BYTES, StateKind, Tier

PAGE_NUMEL = PAGE_BYTES // 2
"""Buffers are whole pages in 16 bit."""


def wanted_slabs(config: Config, partition: Partition, least: int) -> int | Literal["auto"]:
    """Slabs per unit size: ``infinity.slabs``, or the ``buffer_count`` of parameters that are on NVMe.

    ``least`` are those that one call needs at once. Raises ``ConfigError`` with the number that works.
    """
    own, offload = config.infinity.slabs, config.zero_optimization.offload_param
    if offload is None or offload.tier is not Tier.NVME or not partition.units:
        return own
    largest = max(partition.units, key=lambda unit: unit.layout.numel)
    if offload.buffer_size != "auto" and offload.buffer_size < largest.layout.numel:
        raise ConfigError(
            f"`zero_optimization.offload_param.buffer_size` is {offload.buffer_size} elements, but unit "
            f'"{largest.name}" moves as one buffer of {largest.layout.numel}; set it to at least '
            f'{largest.layout.numel}, or to "auto"'
        )
    if offload.buffer_count == "auto":
        return own
    if offload.buffer_count < least:
        raise ConfigError(
            f"`zero_optimization.offload_param.buffer_count` is {offload.buffer_count}, but one call of this "
            f'model needs {least} buffers of one size at once; set it to at least {least}, or to "auto"'
        )
    if own not in ("auto", offload.buffer_count):
        raise ConfigError(
            f"`infinity.slabs` is {own}, but `zero_optimization.offload_param.buffer_count` is {offload.buffer_count}; "
            "they are two names of one number, so drop one"
        )
    return offload.buffer_count


def within_buffer(config: Config, numel: int, *, asked: bool) -> int:
    """A sub-group of ``numel`` elements, or of as many as fit the optimizer's ``buffer_size``.

    ``asked`` says that the config named the sub-group's size. Raises ``ConfigError`` with the number that works.
    """
    offload = config.zero_optimization.offload_optimizer
    if offload is None or offload.buffer_size == "auto" or offload.tier is not Tier.NVME:
        return numel
    key, size = "zero_optimization.offload_optimizer.buffer_size", offload.buffer_size
    if size < PAGE_NUMEL:
        raise ConfigError(
            f'`{key}` is {size} elements, but buffers are whole pages; set it to at least {PAGE_NUMEL}, or to "auto"'
        )
    if asked and numel > size:
        raise ConfigError(
            f"`{key}` is {size} elements, but `zero_optimization.sub_group_size` makes sub-groups of {numel}; set it "
            f'to at least {numel}, or to "auto"'
        )
    return min(numel, size // PAGE_NUMEL * PAGE_NUMEL)


def buffered_ring(config: Config, placement: Placement, usual: int) -> int:
    """Sub-groups in flight: ``usual``, or as many as the optimizer's ``buffer_count`` buffers hold.

    A buffer is for one state of one sub-group, as in DeepSpeed: gradient, master, moments, as far as they are on NVMe.
    Raises ``ConfigError`` with the number that works.
    """
    offload = config.zero_optimization.offload_optimizer
    if offload is None or offload.buffer_count == "auto" or offload.tier is not Tier.NVME:
        return usual
    states = sum(placement[kind] is Tier.NVME for kind in (StateKind.GRAD, *OPTIMIZER_KINDS))
    if offload.buffer_count < states:
        raise ConfigError(
            f"`zero_optimization.offload_optimizer.buffer_count` is {offload.buffer_count}, but a sub-group needs "
            f"a buffer for each of its {states} states on NVMe; set it to at least {states} ({3 * states} to read, "
            'update, write at the same time), or to "auto"'
        )
    return min(usual, offload.buffer_count // states) if states else usual
