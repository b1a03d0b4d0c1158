"""Measures what a step on NVMe cannot be faster than: the disk by fio, the bytes of one step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from bench.io_contestants import Cell, Unavailable, fio
from infinity.storage.traffic import Pattern, TrialFiles

BLOCK_BYTES = 1 << 20
QUEUE_DEPTH = 32


class MixedDisk(AbstractContextManager["MixedDisk"]):
    """fio reading one file while it writes another, each of its engines; ``sample`` keeps the best rate of the turn."""

    def __init__(self, directory: str, nbytes: int) -> None:
        self.rates: list[float] = []
        self._files = TrialFiles([directory], nbytes)
        try:
            self._runs = fio(Cell(Pattern.MIX, BLOCK_BYTES, QUEUE_DEPTH), self._files)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def sample(self) -> float | None:
        """GB/s, both ways added up; None where fio does not run."""
        rates = []
        for run in self._runs.values():
            try:
                rates.append(run().rate)
            except Unavailable:
                continue
        if not rates:
            return None
        self.rates.append(max(rates))
        return max(rates)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, traceback)


def link_bytes(facts: dict[str, Any]) -> float:
    """What our engine moved per step, both ways, by its own count."""
    links = facts["links"]
    total: int = links["nvme_read"]["bytes"] + links["nvme_write"]["bytes"]
    steps: int = facts["steps"]
    return total / max(1, steps)


def largest_cost(compute: float, adam: float, nbytes: float, rate: float) -> tuple[float, str]:
    """Seconds of the longest of the three with its name; ``rate`` in GB/s."""
    costs = {"compute": compute, "adam": adam, "io": nbytes / rate / 1e9}
    name = max(costs, key=lambda key: costs[key])
    return costs[name], name
