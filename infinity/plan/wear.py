"""How long an SSD lasts under a training run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wear:
    """``written`` bytes per step against ``endurance`` bytes, the TBW of the data sheet."""

    written: int
    endurance: int

    @property
    def steps(self) -> int | None:
        """Whole steps until the stated endurance is used up; None if nothing is written."""
        return self.endurance // self.written if self.written else None
