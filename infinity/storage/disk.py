"""Says what is behind a directory, as far as that falsifies a measurement."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys/dev/block")
HYPERVISOR_BUSES = {"virtio": "virtio", "vbd-": "Xen", "vmbus": "Hyper-V"}


@dataclass(frozen=True)
class Disk:
    """The block device of a directory; ``path`` is where sysfs shows it, None for a file system without one."""

    name: str | None
    path: str | None
    model: str = ""
    rotational: bool = False

    def doubts(self) -> Iterator[str]:
        """Why a rate measured here may not be that of a disk, one sentence each."""
        if self.path is None:
            yield "no block device is behind it (tmpfs, network or stacked file system): RAM or a network is measured"
            return
        bus = next((name for part, name in HYPERVISOR_BUSES.items() if f"/{part}" in self.path), None)
        if bus is not None:
            yield (
                f"{self.name} is a virtual disk ({bus}): the host's page cache may answer, so reads of a large, cold "
                "swap can be slower than measured"
            )
        elif "/virtual/" in self.path:
            yield f"{self.name} is a software device (loop, RAM, RAID or mapper), not a disk itself"
        if "Elastic Block Store" in self.model or "PersistentDisk" in self.model:
            yield f"{self.name} is a network disk ({self.model}), whose rate falls when its burst credit is used up"
        if self.rotational and bus is None:
            yield f"{self.name} spins: random access is far slower than the sequential rate"


def disk_of(directory: str) -> Disk:
    """Looks the file system's device up in sysfs."""
    number = os.stat(directory).st_dev
    entry = SYSFS / f"{os.major(number)}:{os.minor(number)}"
    if not entry.exists():
        return Disk(None, None)
    device = entry.resolve()
    whole = device if (device / "queue").exists() else device.parent  # a partition has no queue of its own
    return Disk(
        device.name,
        str(device),
        _text(whole / "device" / "model"),
        _text(whole / "queue" / "rotational") == "1",
    )


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
