"""The three tiers, the kinds of state that live on them, the two page sizes every offset is a multiple of."""

from __future__ import annotations

from enum import Enum

PAGE_BYTES = 4096
"""Alignment of every extent, shard and direct I/O request."""

HUGE_PAGE_BYTES = 2 << 20
"""Alignment of every arena: one request segment per 2 MiB instead of 512 triples disk bandwidth."""


class Tier(str, Enum):
    """Where bytes live. On a machine without an accelerator ``DEVICE`` is a budget of RAM."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class StateKind(str, Enum):
    """What bytes are. 16-bit training keeps 2 + 4 + 4 + 4 + 4 bytes per parameter of the first five."""

    PARAM = "param"
    GRAD = "grad"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    ACTIVATION = "activation"


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple
