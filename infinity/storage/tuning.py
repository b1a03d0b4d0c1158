"""Finds the I/O setting that serves given swap directories best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from infinity.errors import StorageError
from infinity.storage.io_engine import BACKENDS, IoEngine, probe
from infinity.storage.traffic import Pattern, Sample, Setting, TrialFiles, measure

BLOCK_SIZES = (256 << 10, 1 << 20, 4 << 20, 8 << 20)
QUEUE_DEPTHS = (8, 32, 64)
THREADS = (2, 4, 8)
POOLS = ("threads", "python")
"""Backends whose number of threads counts."""

NOISE = 0.03
"""Rates that differ by less are the same: of those the default wins, or else the least CPU time."""

ROUNDS = 3
RUN_SECONDS = 0.15
MIN_RUN_BYTES = 16 << 20
STAGE_ENDS = (0.4, 0.9, 1.0)
"""When each stage must end, as a share of the time there is."""

MAX_WINDOW_BYTES = 512 << 20


@dataclass
class Trial:
    """One setting with what was measured under it."""

    setting: Setting
    samples: dict[Pattern, list[Sample]] = field(default_factory=dict)

    def rate(self, pattern: Pattern) -> float:
        """Median in GB/s (10^9 bytes)."""
        return statistics.median(sample.rate for sample in self.samples[pattern])

    def cpu_per_gb(self) -> float:
        """Median over everything measured, in seconds."""
        return statistics.median(sample.cpu_per_gb for runs in self.samples.values() for sample in runs)

    def score(self) -> float:
        """GB/s of a step that reads as much alone as it writes alone as it moves both ways: a harmonic mean."""
        return len(self.samples) / sum(1 / self.rate(pattern) for pattern in self.samples)


class Tuner:
    """Measures trials on ``files`` through ``window``.

    A run moves what the disk is likely to move in RUN_SECONDS, so that a slow one is not measured for minutes.
    """

    def __init__(self, files: TrialFiles, window: torch.Tensor) -> None:
        self._files = files
        self._window = window
        likely = int(files.fill_rate * RUN_SECONDS / len(files.sources)) // MIN_RUN_BYTES * MIN_RUN_BYTES
        self.run_bytes = min(files.nbytes, max(MIN_RUN_BYTES, likely))
        """Moved each way in each directory."""

    def measure(
        self, settings: Sequence[Setting], rounds: int, deadline: float, begins: Callable[[Setting], None]
    ) -> list[Trial]:
        """Rounds over all settings in turn, so that a disk that drifts is unjust to none.

        Past ``deadline`` (time.monotonic) only what is needed for one result begins.
        """
        engines: dict[Setting, IoEngine] = {}
        trials = [Trial(setting) for setting in settings]
        try:
            for turn in range(rounds):
                for trial in trials if turn % 2 == 0 else trials[::-1]:
                    if time.monotonic() > deadline and any(measured.samples for measured in trials):
                        break
                    begins(trial.setting)
                    if trial.setting not in engines:
                        engines[trial.setting] = trial.setting.open([self._window])
                    self._run(engines[trial.setting], trial)
        finally:
            for engine in engines.values():
                engine.close()
        return [trial for trial in trials if trial.samples]

    def _run(self, engine: IoEngine, trial: Trial) -> None:
        window = self._window[: trial.setting.window_bytes]
        for pattern in Pattern:
            sample = measure(engine, self._files, pattern, window, nbytes=self.run_bytes)
            trial.samples.setdefault(pattern, []).append(sample)


def working_engines() -> list[str]:
    """The backends that can be used here."""
    found = [name for name in BACKENDS if probe(name) is None]
    if not found:
        raise StorageError("no I/O backend works here", action="`infinity doctor` says why")
    return found


def stages(engines: Sequence[str]) -> Iterator[Callable[[Setting], list[Setting]]]:
    """What to try, from the best so far: every engine, then block sizes with depths, then numbers of threads."""
    yield lambda best: [Setting(engine) for engine in engines]
    yield lambda best: [
        Setting(best.engine, block, depth)
        for block in BLOCK_SIZES
        for depth in QUEUE_DEPTHS
        if 2 * block * depth <= MAX_WINDOW_BYTES
    ]
    yield lambda best: [
        Setting(best.engine, best.block_size, best.queue_depth, threads)
        for threads in (THREADS if best.engine in POOLS else ())
    ]


def tune(
    tuner: Tuner, engines: Sequence[str], seconds: float, begins: Callable[[Setting], None]
) -> tuple[Trial, list[Trial]]:
    """The best trial, then all of them; the last measurement of a setting is the one that counts."""
    start = time.monotonic()
    best = Trial(Setting(engines[0]))
    tried: dict[Setting, Trial] = {}
    for stage, share in zip(stages(engines), STAGE_ENDS, strict=True):
        settings = stage(best.setting)
        if not settings or (best.samples and time.monotonic() > start + seconds * share):
            continue
        trials = tuner.measure(settings, ROUNDS, start + seconds * share, begins)
        tried |= {trial.setting: trial for trial in trials}
        # A stage that was cut short before it came to the best so far cannot replace it unless it beats it.
        if best.samples and all(trial.setting != best.setting for trial in trials):
            trials = [*trials, best]
        best = choose(trials)
    return best, list(tried.values())


def choose(trials: Sequence[Trial]) -> Trial:
    """The default shape where no other is better, else the cheapest of those that are as good as the best."""
    top = max(trial.score() for trial in trials)
    good = [trial for trial in trials if trial.score() >= top * (1 - NOISE)]
    if len({trial.setting.engine for trial in trials}) == 1:
        for trial in good:
            if trial.setting == Setting(trial.setting.engine):
                return trial
    return min(good, key=Trial.cpu_per_gb)
