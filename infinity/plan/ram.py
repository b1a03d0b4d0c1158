"""How much RAM there is, by the system, by the cgroups of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/")


def available_host_memory(root: Path = ROOT) -> int:
    """Bytes of RAM this process may still use: what the system has left, or less where a cgroup says so."""
    left = [limit - used for limit, used in cgroup_limits(root)]
    return max(0, min([int(psutil.virtual_memory().available), *left]))


def installed_host_memory(root: Path = ROOT) -> int:
    """Bytes of RAM that could ever be this process's: the machine's, or its tightest cgroup's."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in cgroup_limits(root))])


def cgroup_limits(root: Path = ROOT) -> Iterator[tuple[int, int]]:
    """``(limit, used)`` in bytes of every memory cgroup that holds this process, from its own one upwards."""
    for base, own, limit_name, used_name in (
        (root / "sys/fs/cgroup", _own_path(root, ""), "memory.max", "memory.current"),
        (root / "sys/fs/cgroup/memory", _own_path(root, "memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        directory = base / own
        while True:
            found = _read(directory / limit_name), _read(directory / used_name)
            if found[0] is not None and found[1] is not None:
                yield found[0], found[1]
            if directory == base:
                break
            directory = directory.parent


def _own_path(root: Path, controller: str) -> str:
    """This process's cgroup below the mount point; version 2 has one line with no controller."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            # A path from outside of this container's view is not below the mount point, whose root is ours then.
            return "" if ".." in path else path.strip("/")
    return ""


def _read(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))  # "max" is no number
    except (OSError, ValueError):
        return None
