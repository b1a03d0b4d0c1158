"""Cuts a shard into the pieces the optimizer reads, updates, writes at a time."""

from __future__ import annotations

from infinity.tier import PAGE_BYTES


def subgroups(shard_numel: int, subgroup_numel: int) -> list[tuple[int, int]]:
    """Element ranges of at most ``subgroup_numel``, each starting on a page boundary of every dtype in use.

    >>> subgroups(10240, 4096)
    [(0, 4096), (4096, 8192), (8192, 10240)]
    """
    page_elements = PAGE_BYTES // 2
    piece = max(page_elements, subgroup_numel // page_elements * page_elements)
    return [(start, min(start + piece, shard_numel)) for start in range(0, shard_numel, piece)]
