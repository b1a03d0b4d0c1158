"""The ranks that train one model together."""

from __future__ import annotations

import os
from dataclasses import dataclass

from infinity.errors import ConfigError


@dataclass(frozen=True)
class Group:
    """This process among its peers. At world size 1 every collective is the identity, so none is called."""

    rank: int
    world_size: int


def open_group() -> Group:
    """The group that the launcher's environment describes."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != 1:
        raise ConfigError(
            f"WORLD_SIZE is {world_size}; this version trains on one rank. Start it without torchrun or with "
            "--nproc_per_node 1"
        )
    return Group(rank=0, world_size=1)
