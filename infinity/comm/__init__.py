"""Collectives: how many ranks there are, what they exchange."""

from infinity.comm.group import Group, open_group

__all__ = ["Group", "open_group"]
