"""What one step took: the difference between two of the engine's reports."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LinkUse:
    """Bytes that went over a link during a step; ``rate`` is their average over the whole step in GB/s (10^9)."""

    bytes: int
    rate: float


@dataclass(frozen=True)
class TierUse:
    """Bytes of one tier since the start; ``budget`` is None where there is no limit."""

    budget: int | None
    planned: int
    peak: int


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Times are in seconds, ``loss`` in nats per token, averaged over the step's micro batches."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float | None
    tokens: int
    seconds: float
    phases: dict[str, float]
    stalls: dict[str, float]
    links: dict[str, LinkUse]
    tiers: dict[str, TierUse]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def as_json(self) -> dict[str, Any]:
        """The line of this step in metrics.jsonl."""
        return {
            "event": "step",
            "step": self.step,
            "loss": self.loss,
            "learning_rate": self.learning_rate,
            "gradient_norm": self.gradient_norm,
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
            "time": self.phases,
            "stalls": self.stalls,
            "links": {name: {"bytes": use.bytes, "GB_per_second": use.rate} for name, use in self.links.items()},
            "tiers": {
                name: {"budget_bytes": use.budget, "planned_bytes": use.planned, "peak_bytes": use.peak}
                for name, use in self.tiers.items()
            },
        }


class StepMeter:
    """Turns the engine's cumulative counters into steps; what passes between two steps (an evaluation) is left out."""

    def __init__(self) -> None:
        self._report: Mapping[str, Any] = {}
        self._start = 0.0

    def start(self, report: Mapping[str, Any]) -> None:
        """A step begins now."""
        self._report, self._start = report, time.perf_counter()

    def finish(
        self,
        report: Mapping[str, Any],
        *,
        step: int,
        loss: float,
        learning_rate: float,
        gradient_norm: float | None,
        tokens: int,
    ) -> StepRecord:
        """The step that began at ``start`` ends now."""
        before, seconds = self._report, time.perf_counter() - self._start
        traffic = {name: use["bytes"] - before["links"][name]["bytes"] for name, use in report["links"].items()}
        return StepRecord(
            step=step,
            loss=loss,
            learning_rate=learning_rate,
            gradient_norm=gradient_norm,
            tokens=tokens,
            seconds=seconds,
            phases={name: value - before["time"][name] for name, value in report["time"].items()},
            stalls={name: value - before["stalls"].get(name, 0.0) for name, value in report["stalls"].items()},
            links={name: LinkUse(moved, moved / seconds / 1e9) for name, moved in traffic.items()},
            tiers=tier_use(report),
        )


def tier_use(report: Mapping[str, Any]) -> dict[str, TierUse]:
    """The tiers of a report."""
    return {
        name: TierUse(use["budget_bytes"], use["planned_bytes"], use["peak_bytes"])
        for name, use in report["tiers"].items()
    }
