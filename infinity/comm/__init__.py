"""Collectives: how many ranks there are, what they exchange."""

from infinity.comm.group import Group, open_group
from infinity.comm.transport import rank_expected, ranks_expected

__all__ = ["Group", "open_group", "rank_expected", "ranks_expected"]
