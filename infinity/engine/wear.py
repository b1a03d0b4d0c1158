"""Warns of what a run writes to NVMe in a day, or ends it there."""

from __future__ import annotations

import logging
import time

from infinity.comm import Group
from infinity.config.runtime import InfinityConfig
from infinity.errors import WearError
from infinity.obs.wear import WearMeter

log = logging.getLogger("infinity")


class WearGuard:
    """What ``infinity.nvme_writes_per_day`` means for one rank: a warning a day, or the end of all ranks."""

    def __init__(self, config: InfinityConfig, group: Group) -> None:
        limit = config.nvme_writes_per_day
        self._meter = WearMeter(None if limit == "auto" else limit)
        self._stops, self._group = config.nvme_writes_stop, group
        self._over = ""

    def note(self, written: int) -> None:
        """Takes the bytes written since the start; called once a step."""
        now = time.monotonic()
        warning = self._meter.note(written, now)
        self._over = self._meter.sentence(now) if self._meter.is_over else ""
        if warning and not self._stops:
            log.warning(warning)

    def check(self) -> None:
        """Raises ``WearError`` on every rank where one has written more than it may; called after a step."""
        if not self._stops:
            return
        for rank, words in enumerate(self._group.talk("the bytes written in a day", self._over.encode())):
            if words:
                who = f"rank {rank}: " if self._group.world_size > 1 else ""
                raise WearError(
                    f"{who}{words.decode()}. infinity.nvme_writes_stop is true, so training ends here; this step was "
                    "made, a checkpoint can be saved, from which a run goes on when the day is over"
                )
