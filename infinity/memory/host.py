"""Page-aligned host memory of exact size on huge pages."""

from __future__ import annotations

import contextlib
import mmap

import torch

from infinity.errors import CapacityError
from infinity.tier import HUGE_PAGE_BYTES, round_up


class HostMemory:
    """An anonymous mapping as a 1-D uint8 tensor, 2 MiB-aligned, on huge pages where the system gives them.

    Disk requests on 2 MiB pages are one segment instead of hundreds, which doubles to triples bandwidth. Memory reads
    as zero and costs nothing until touched.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.huge_pages = False
        mapped = round_up(max(nbytes, 1), HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES
        try:
            self._mapping = mmap.mmap(-1, mapped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CapacityError(
                f"RAM: {mapped} bytes cannot be mapped: {error.strerror}. Raise the limit of this process (ulimit -v) "
                "or lower infinity.device_memory and infinity.host_memory"
            ) from None
        with contextlib.suppress(AttributeError, OSError):
            # A child made by fork has no use for it, but would get a copy of every page that the kernel has pinned.
            self._mapping.madvise(mmap.MADV_DONTFORK)
        try:
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
            self.huge_pages = True
        except (AttributeError, OSError):
            pass
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        start = -whole.data_ptr() % HUGE_PAGE_BYTES
        self.bytes = whole[start : start + nbytes]

    def free(self) -> None:
        """Gives the pages back to the system; every view of this memory reads as zero afterwards."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(OSError):  # in a child made by fork there are none
            self._mapping.madvise(mmap.MADV_DONTNEED)
