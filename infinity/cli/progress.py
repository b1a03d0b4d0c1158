"""Shows a run while it goes: a calm panel on a terminal, one line a step elsewhere."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from infinity.cli.measure import LinkUse, StepRecord, TierUse
from infinity.config.size import format_bytes, is_decimal

SHOWN_STALL_SECONDS = 0.005


@dataclass(frozen=True)
class Heading:
    """What is known before the first step."""

    parameters: int
    dtype: str
    steps: int
    micro_batch: int
    accumulation: int
    ranks: int
    sequence_length: int
    seed: int
    corpus: str
    train_bytes: int
    held_back_bytes: int
    unigram_entropy: float
    io_engine: str
    isa: str

    def lines(self) -> list[str]:
        """The model, the run, the text."""
        batch = " x ".join(str(n) for n in (self.micro_batch, self.accumulation, self.ranks) if n > 1) or "1"
        train, held_back = format_bytes(self.train_bytes), format_bytes(self.held_back_bytes)
        return [
            f"model   {self.parameters / 1e6:.1f} M parameters in {self.dtype}, Adam {self.isa}, I/O {self.io_engine}",
            f"run     {self.steps} steps of {batch} x {self.sequence_length} tokens, seed {self.seed}",
            f"text    {self.corpus}, {train} to train on, {held_back} held back",
            f"        unigram entropy {self.unigram_entropy:.3f} nats per byte",
        ]


class Shown(Protocol):
    """Where a run tells how it goes."""

    def begin(self, heading: Heading) -> None:
        """The first step is about to start."""

    def step(self, record: StepRecord) -> None:
        """A step is done."""

    def evaluated(self, step: int, loss: float) -> None:
        """Held-back text was read after ``step`` steps."""

    def saving(self, done: int, total: int) -> None:
        """So many bytes of a checkpoint are written, all of them when it is complete; called on another thread."""

    def say(self, text: str) -> None:
        """Something out of the ordinary."""

    def close(self) -> None:
        """Nothing more will be shown; harmless when repeated."""


def open_progress(console: Console, *, every: int) -> Shown:
    """A panel if ``console`` is a terminal, otherwise a line every ``every`` steps (0: evaluations alone)."""
    return Panel(console) if console.is_terminal else Lines(console, every=every)


class Lines:
    """One line per step or evaluation, for files and pipes."""

    def __init__(self, console: Console, *, every: int) -> None:
        self._console, self._every = console, every
        self._steps, self._entropy = 0, math.nan

    def begin(self, heading: Heading) -> None:
        self._steps, self._entropy = heading.steps, heading.unigram_entropy
        for line in heading.lines():
            self.say(line)

    def step(self, record: StepRecord) -> None:
        if self._every and (record.step % self._every == 0 or record.step in (1, self._steps)):
            parts = [self._place(record.step), f"loss {record.loss:.3f}", *_rates(record)]
            parts += [f"time {_seconds(record.phases)}", f"stalls {_seconds(record.stalls, SHOWN_STALL_SECONDS)}"]
            parts += [_links(record.links), _tiers(record.tiers)]
            self.say(" | ".join(parts))

    def evaluated(self, step: int, loss: float) -> None:
        self.say(f"{self._place(step)} | held-back loss {loss:.3f} (unigram entropy {self._entropy:.3f})")

    def saving(self, done: int, total: int) -> None:
        pass  # the log says how long it took

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def close(self) -> None:
        pass

    def _place(self, step: int) -> str:
        return f"step {step:>{len(str(self._steps))}}/{self._steps}"


class Panel:
    """A bar, the numbers of the last step below it, one more bar during a save, evaluations left standing above."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}", style="bold"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left", style="dim"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("train", total=None, visible=False)
        self._save_bar = Progress(
            TextColumn("saving", style="dim"), BarColumn(bar_width=None), DownloadColumn(), TransferSpeedColumn(),
            console=console, expand=True,
        )  # fmt: skip
        self._save: TaskID | None = None
        self._entropy, self._held_back = math.nan, math.nan
        self._record: StepRecord | None = None
        self._live = Live(self.bars(), console=console, refresh_per_second=4, transient=True)

    def begin(self, heading: Heading) -> None:
        self._entropy = heading.unigram_entropy
        for line in heading.lines():
            self._console.print(line, markup=False, highlight=False)
        self._bar.update(self._task, total=heading.steps, completed=0, visible=True)
        self._live.start()

    def step(self, record: StepRecord) -> None:
        self._record = record
        self._bar.update(self._task, completed=record.step)
        self._live.update(Group(self.bars(), self._numbers(record)))

    def saving(self, done: int, total: int) -> None:
        if self._save is None:
            self._save = self._save_bar.add_task("save", total=total)
        self._save_bar.update(self._save, completed=done)
        if done == total:
            self._save_bar.remove_task(self._save)
            self._save = None

    def bars(self) -> Group:
        """Of the run, of the save under way."""
        return Group(self._bar, self._save_bar)

    def _numbers(self, record: StepRecord) -> Table:
        numbers = Table.grid(padding=(0, 2, 0, 0))
        numbers.add_column(style="dim", no_wrap=True)
        numbers.add_column(ratio=1)
        held_back = "" if math.isnan(self._held_back) else f", held back {self._held_back:.3f}"
        numbers.add_row("loss", f"[bold]{record.loss:.3f}[/]{held_back}, unigram entropy {self._entropy:.3f}")
        numbers.add_row("rate", ", ".join(_rates(record)))
        numbers.add_row("time", _seconds(record.phases))
        numbers.add_row("stalls", _seconds(record.stalls, SHOWN_STALL_SECONDS))
        numbers.add_row("links", _links(record.links))
        numbers.add_row("memory", _tiers(record.tiers))
        return numbers

    def evaluated(self, step: int, loss: float) -> None:
        self._held_back = loss
        text = f"after {step:>4} steps: loss on held-back text {loss:.3f}, unigram entropy {self._entropy:.3f}"
        self._console.print(text, markup=False, highlight=False)
        if self._record is not None:
            self._live.update(Group(self.bars(), self._numbers(self._record)))

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


class LogLines(logging.Handler):
    """Sends the package's log through the display, so that a line never tears the panel."""

    def __init__(self, shown: Shown) -> None:
        super().__init__(logging.INFO)
        self._shown = shown

    def emit(self, record: logging.LogRecord) -> None:
        label = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        self._shown.say(label + record.getMessage())


def _rates(record: StepRecord) -> list[str]:
    norm = "none" if record.gradient_norm is None else f"{record.gradient_norm:.2f}"
    return [
        f"lr {record.learning_rate:.1e}",
        f"grad norm {norm}",
        f"{record.tokens_per_second:.0f} tokens/s",
        f"{record.seconds:.2f} s/step",
    ]


def _seconds(parts: dict[str, float], least: float = 0.0) -> str:
    shown = [f"{name.replace('_', ' ')} {seconds:.2f}" for name, seconds in parts.items() if seconds >= least]
    return f"{', '.join(shown)} s" if shown else "none"


def _links(links: dict[str, LinkUse]) -> str:
    used = [f"{name.replace('_', ' ')} {use.rate:.2f}" for name, use in links.items() if use.bytes]
    return f"{', '.join(used)} GB/s" if used else "idle"


def _tiers(tiers: dict[str, TierUse]) -> str:
    decimal = any(use.budget is not None and is_decimal(use.budget) for use in tiers.values())

    def one(name: str, use: TierUse) -> str:
        shown = f"{name} {format_bytes(use.peak, decimal)}"
        return shown if use.budget is None else f"{shown} of {format_bytes(use.budget, decimal)}"

    return ", ".join(one(name, use) for name, use in tiers.items() if use.peak or use.planned)
