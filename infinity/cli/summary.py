"""The end of a run: its numbers, as a table or as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from infinity.cli.measure import TierUse
from infinity.config.size import format_bytes, is_decimal

TOLERANCE = 0.1
"""How far the process may exceed floor + budgets before the table calls it too much."""


@dataclass(frozen=True)
class ProcessMemory:
    """Peaks of this process in bytes; ``floor`` is what importing torch and the activations alone cost, if measured."""

    anonymous_before_model: int
    anonymous_peak: int
    resident_peak: int
    floor: int | None

    def bound(self, tiers: dict[str, TierUse]) -> int | None:
        """Floor + RAM budgets (the plan where there is none) + 10 %."""
        if self.floor is None:
            return None
        budgets = sum(
            use.planned if use.budget is None else use.budget for name, use in tiers.items() if name != "nvme"
        )
        return int((self.floor + budgets) * (1 + TOLERANCE))


@dataclass(frozen=True)
class Summary:
    """What a finished run came to: ``steps`` in all, ``steps_done`` of them since it was resumed. Losses in nats per
    token, ``held_back`` by step."""

    parameters: int
    steps: int
    steps_done: int
    seconds: float
    tokens_per_second: float
    last_loss: float | None
    held_back: dict[int, float]
    unigram_entropy: float
    tiers: dict[str, TierUse]
    nvme_read_per_step: int
    nvme_written_per_step: int
    swap_left: list[str]
    memory: ProcessMemory
    output_dir: str

    def as_json(self) -> dict[str, Any]:
        """The last line of metrics.jsonl, the output of ``--json``."""
        numbers = asdict(self)
        numbers["memory"]["bound"] = self.memory.bound(self.tiers)
        return {"event": "end", **numbers}

    def show(self, console: Console) -> None:
        """Two tables: the tiers, then everything else."""
        tiers = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
        tiers.add_column("tier")
        for name in ("budget", "plan", "measured peak"):
            tiers.add_column(name, justify="right")
        decimal = self._decimal
        for name, use in self.tiers.items():
            budget = "no limit" if use.budget is None else format_bytes(use.budget, decimal)
            tiers.add_row(name, budget, format_bytes(use.planned, decimal), format_bytes(use.peak, decimal))
        rest = Table.grid(padding=(0, 3, 0, 0))
        rest.add_column(style="dim", no_wrap=True)
        rest.add_column(overflow="fold")
        for label, value in self._rows():
            rest.add_row(label, Text(value))
        console.print(Group("", tiers, "", rest), highlight=False)

    @property
    def _decimal(self) -> bool:
        """Whether budgets were given in MB, as the plan is shown then too."""
        return any(use.budget is not None and is_decimal(use.budget) for use in self.tiers.values())

    def _rows(self) -> list[tuple[str, str]]:
        memory, bound = self.memory, self.memory.bound(self.tiers)
        steps = f"{self.steps} steps" if self.steps_done == self.steps else f"{self.steps_done} of {self.steps} steps"
        rows = [("training", f"{steps} in {self.seconds:.0f} s, {self.tokens_per_second:.0f} tokens/s")]
        if self.held_back:
            losses = list(self.held_back.values())
            course = f"{losses[0]:.3f} → {losses[-1]:.3f}" if len(losses) > 1 else f"{losses[0]:.3f}"
            rows.append(("held-back loss", f"{course} nats per byte; unigram entropy {self.unigram_entropy:.3f}"))
        read, written = (
            format_bytes(size, self._decimal) for size in (self.nvme_read_per_step, self.nvme_written_per_step)
        )
        peak, before = format_bytes(memory.anonymous_peak), format_bytes(memory.anonymous_before_model)
        rows += [
            ("NVMe per step", f"{read} read, {written} written"),
            ("swap files left", ", ".join(self.swap_left) or "none"),
            ("anonymous memory", f"{peak} at its peak, {before} before the model was built"),
            ("resident memory", f"{format_bytes(memory.resident_peak)} at its peak, mapped files included"),
        ]
        if memory.floor is not None and bound is not None:
            verdict = "kept" if memory.anonymous_peak <= bound else "EXCEEDED"
            parts = f"{format_bytes(memory.floor)} for torch and activations, plus budgets, plus 10 %"
            rows.append(("memory bound", f"{format_bytes(bound)} = {parts}: {verdict}"))
        return [*rows, ("written to", self.output_dir)]
