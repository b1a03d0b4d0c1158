"""Turns paired step times into medians, ratios, tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.step_contestants import Task


@dataclass(frozen=True)
class Round:
    """Consecutive steps of one contestant, settled at the end.

    ``seconds_per_step`` is the interval between the ends of two steps, as in a long run: ours returns while the update
    is in flight and overlaps it with the next forward. ``settled`` is all the time until everything is done, divided by
    the steps, so the last update, which nothing overlaps, counts as well.
    """

    seconds_per_step: float
    cpu_per_step: float
    losses: tuple[float, ...]
    foreign: float = 0.0
    """Processors kept busy by other processes."""
    split: dict[str, float] = field(default_factory=dict)
    settled: float = 0.0


@dataclass(frozen=True)
class Ratio:
    """Median of the ratios of paired rounds, with the smallest, the largest."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
        """Round by round."""
        values = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
        return Ratio(statistics.median(values), values[0], values[-1])

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass
class Group:
    """Contestants that took turns on one task; ``rounds[name][i]`` are of the same turn for every name.

    ``losses`` are those of every step since the first, warm-up and rounds that were tried again included.
    """

    title: str
    task: Task
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    floor: dict[str, float] = field(default_factory=dict)

    def times(self, name: str) -> list[float]:
        return [each.seconds_per_step for each in self.rounds[name]]

    def settled_ratio(self, name: str, other: str) -> Ratio | None:
        """The same of the times that count the last update in full."""
        if name not in self.rounds or other not in self.rounds:
            return None
        return Ratio.of([each.settled for each in self.rounds[name]], [each.settled for each in self.rounds[other]])

    def median(self, name: str) -> float:
        """Seconds per step."""
        return statistics.median(self.times(name))

    def ratio(self, name: str, other: str) -> Ratio | None:
        """Time of ``name`` over that of ``other``; None where one of them is missing."""
        if name not in self.rounds or other not in self.rounds:
            return None
        return Ratio.of(self.times(name), self.times(other))

    def apart(self, reference: str = "plain") -> dict[str, float]:
        """Per contestant the largest difference of a loss from the reference's."""
        if reference not in self.rounds:
            return {}
        mine = self.losses[reference]
        return {
            name: max(abs(a - b) for a, b in zip(self.losses[name], mine, strict=False))
            for name in self.rounds
            if name != reference
        }

    def split(self, name: str) -> dict[str, float]:
        """Median seconds per step by phase; ours with what the training thread waited for, by cause."""
        rounds = self.rounds[name]
        return {
            key: statistics.median(each.split.get(key, 0.0) for each in rounds)
            for key in dict.fromkeys(key for each in rounds for key in each.split)
        }

    def table(self) -> str:
        """The group as a table of Markdown."""
        task = self.task
        last = min((len(self.losses[name]) for name in self.rounds), default=0) - 1
        lines = [
            f"### {self.title}: {task.dtype}, {task.tokens} tokens, {task.threads} threads, "
            f"{task.micro_batches} micro-batch{'es' if task.micro_batches > 1 else ''}",
            "",
            "| | s/step | to plain | settled s/step | to plain | CPU s | CPUs of others | tokens/s "
            f"| peak RSS over import, MiB | read, written MB/step | loss of step 1, 2, {last + 1} | split, s |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for name in self.rounds:
            facts, times = self.facts[name], sorted(self.times(name))
            ratio = self.ratio(name, "plain")
            steps = max(1, facts["steps"])
            losses = self.losses[name]
            foreign = statistics.median(each.foreign for each in self.rounds[name])
            moved = ", ".join(f"{facts[key] / steps / 1e6:.0f}" for key in ("read_bytes", "write_bytes"))
            tokens = task.tokens * task.micro_batches / self.median(name)
            settled, whole = self.settled_ratio(name, "plain"), statistics.median(e.settled for e in self.rounds[name])
            cpu = statistics.median(each.cpu_per_step for each in self.rounds[name])
            split = ", ".join(f"{key} {value:.3f}" for key, value in where(self.split(name)).items() if value >= 5e-4)
            lines.append(
                f"| {name} | {self.median(name):.3f} ({times[0]:.3f} to {times[-1]:.3f}) | {ratio or ''} "
                f"| {whole:.3f} | {settled or ''} | {cpu:.2f} "
                f"| {foreign:.2f} | {tokens:.0f} | {(facts['peak_rss'] - facts['import_rss']) / 2**20:.0f} | {moved} "
                f"| {losses[0]:.4f}, {losses[1]:.4f}, {losses[last]:.4f} | {split} |"
            )
        lines.append("")
        apart = self.apart()
        if apart:
            lines.append(
                f"Largest difference of a loss from plain's over {last + 1} steps: "
                + ", ".join(f"{name} {value:.1e}" for name, value in apart.items())
            )
        lines += [f"- skipped: {why}" for why in self.missing.values()]
        lines += [f"- {name}: {value:.3f}" for name, value in self.floor.items()]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "dtype": self.task.dtype,
            "tokens": self.task.tokens,
            "threads": self.task.threads,
            "micro_batches": self.task.micro_batches,
            "seconds_per_step": {name: self.times(name) for name in self.rounds},
            "settled_per_step": {name: [each.settled for each in rounds] for name, rounds in self.rounds.items()},
            "cpu_per_step": {name: [each.cpu_per_step for each in rounds] for name, rounds in self.rounds.items()},
            "foreign": {name: [each.foreign for each in rounds] for name, rounds in self.rounds.items()},
            "losses": self.losses,
            "split": {name: self.split(name) for name in self.rounds},
            "facts": self.facts,
            "missing": self.missing,
            "floor": self.floor,
        }


BEHIND = ("update", "adam")
"""Phases of our updater, which run beside the others."""


def where(split: Mapping[str, float]) -> dict[str, float]:
    """A step's wall time in parts that add up to it, then what ran beside it.

    Of ours: forward, backward and step without the waits in them, the waits by cause, what happened outside of the
    engine (the loss, autograd between units, the last settle).
    """
    waits = {key: value for key, value in split.items() if key.startswith("wait ")}
    beside = {f"(beside) {key}": value for key, value in split.items() if key in BEHIND}
    phases = {key: value for key, value in split.items() if key not in (*waits, *BEHIND, "wall")}
    if waits:
        phases = {"phases without waits": sum(phases.values()) - sum(waits.values())} | waits
    return phases | {"elsewhere": split.get("wall", 0.0) - sum(phases.values())} | beside
