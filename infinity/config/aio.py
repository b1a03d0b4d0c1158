"""The ``aio`` block: how requests are cut for the disks."""

from __future__ import annotations

from typing import Annotated

from infinity.config.values import Auto, AutoCount, AutoSomeBytes, Block, NoEffect


class AioConfig(Block):
    """Shape of the disk traffic; ``"auto"`` takes what ``infinity nvme tune`` found, or the default."""

    block_size: AutoSomeBytes = 1 << 20
    """Bytes per request, whole 4 KiB pages."""
    queue_depth: AutoCount = 32
    """Requests in flight per disk."""
    thread_count: AutoCount = "auto"
    """Threads that submit requests; DeepSpeed's newer name is ``intra_op_parallelism``."""
    intra_op_parallelism: AutoCount = "auto"
    single_submit: Annotated[bool, NoEffect] = False
    overlap_events: Annotated[bool, NoEffect] = True
    use_gds: Annotated[bool, NoEffect] = False

    @property
    def threads(self) -> int | Auto:
        """The number of threads under whichever of its two names it was given."""
        return self.intra_op_parallelism if self.thread_count == "auto" else self.thread_count
